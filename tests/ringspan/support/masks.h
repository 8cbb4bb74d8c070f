// Masks for kernel tests: the same pairs once as a predicate, for the oracle, and once as tiles, for the kernels. The
// two are written down independently of each other, and neither uses the product's mask code.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ringspan/mask/tile.h"

#include "tests/ringspan/support/oracle.h"

namespace ringspan::test {

enum class MaskKind {
  kFull,
  kCausal,       // j <= i
  kBottomRight,  // j <= i + (kv_len - q_len)
  kWindow,       // a narrow band, and a tile that keeps nothing
  kShifted,      // a band far from the origin: positions and rows differ
  kDocuments,    // causal documents of 1..70 rows, another set in each batch entry; padding at the end
  kStrided,      // causal between rows of stride 3 and of stride 2, bounded on both sides
  kPartial,      // one tile in the middle: the other rows are empty
  kSplit,        // rows in two halves whose positions lie apart, as a head-tail shard holds them
  kScattered,    // random runs of keys in each row, one tile for each run
};
constexpr MaskKind kAllMasks[] = {MaskKind::kFull,    MaskKind::kCausal,    MaskKind::kBottomRight, MaskKind::kWindow,
                                  MaskKind::kShifted, MaskKind::kDocuments, MaskKind::kStrided,     MaskKind::kPartial,
                                  MaskKind::kSplit,   MaskKind::kScattered};
const char* name_of(MaskKind kind);

struct Mask {
  Keep keep;
  std::vector<Tile> tiles;
};
Mask make_mask(MaskKind kind, int64_t batch, int64_t q_len, int64_t kv_len);

// One tile for each run of kept keys in each row.
std::vector<Tile> brute_force_tiles(const Keep& keep, int64_t batch, int64_t q_len, int64_t kv_len);

// The parts of the tiles that read key rows [kv_begin, kv_end).
std::vector<Tile> cut_tiles(const std::vector<Tile>& tiles, int64_t kv_begin, int64_t kv_end);

// [batch][row]: whether a tile covers the query row; the key row.
std::vector<std::vector<bool>> covered_q_rows(const std::vector<Tile>& tiles, int64_t batch, int64_t q_len);
std::vector<std::vector<bool>> covered_kv_rows(const std::vector<Tile>& tiles, int64_t batch, int64_t kv_len);

}  // namespace ringspan::test
