// MaskSpec: which (query, key) pairs of one call are kept, as disjoint bands of global positions, per batch entry or
// one list for all. Everything the library knows of a mask is here; it never becomes a dense matrix.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ringspan/mask/band.h"
#include "ringspan/mask/tile.h"
#include "ringspan/shape/segment.h"

namespace ringspan {

// Where the diagonal of a causal-like mask starts when q_len != kv_len.
//   top-left:      keeps j <= i                     bottom-right:  keeps j <= i + (kv_len - q_len)
enum class Corner : uint8_t { kTopLeft, kBottomRight };

class MaskSpec {
 public:
  // `bands[b]` for batch entry b, or a single list for every entry. Bands are clipped to the lengths and made disjoint.
  MaskSpec(int64_t q_len, int64_t kv_len, std::vector<std::vector<Band>> bands);

  // From bands that are disjoint, tightened and within the lengths already (not checked): only sorts them.
  static MaskSpec from_disjoint(int64_t q_len, int64_t kv_len, std::vector<std::vector<Band>> bands);

  static MaskSpec full(int64_t q_len, int64_t kv_len);
  static MaskSpec causal(int64_t q_len, int64_t kv_len, Corner corner);
  // i - left <= j <= i + right (bottom-right: both shifted by kv_len - q_len); a negative side has no bound.
  static MaskSpec window(int64_t q_len, int64_t kv_len, int64_t left, int64_t right, Corner corner);
  // i // size == j // size and j <= i, i counted from `corner`.
  static MaskSpec chunked(int64_t q_len, int64_t kv_len, int64_t size, Corner corner);
  // j <= i (i counted from `corner`) or j < prefix[b]; one entry serves every batch entry.
  static MaskSpec prefix(int64_t q_len, int64_t kv_len, const std::vector<int64_t>& prefix, Corner corner);

  int64_t q_len() const { return q_len_; }
  int64_t kv_len() const { return kv_len_; }
  // 1 where one list serves every batch entry.
  int64_t num_lists() const { return static_cast<int64_t>(bands_.size()); }
  std::span<const Band> bands(int64_t batch) const { return bands_[num_lists() == 1 ? 0 : batch]; }

  // The mask of batch entries [begin, begin + count) alone; itself where one list serves all.
  MaskSpec entries(int64_t begin, int64_t count) const;

  // The shortest run of `bands(batch)` outside of which no band meets the rows [begin, end). Cost: logarithmic.
  std::span<const Band> bands_meeting(int64_t batch, int64_t begin, int64_t end) const;

  bool keeps(int64_t batch, int64_t i, int64_t j) const;
  int64_t count_pairs(int64_t batch) const;

  bool operator==(const MaskSpec&) const = default;

 private:
  MaskSpec() = default;
  void index_bands();

  int64_t q_len_ = 0, kv_len_ = 0;
  std::vector<std::vector<Band>> bands_;     // sorted by first row
  std::vector<std::vector<int64_t>> reach_;  // largest q_end of bands_[b][0..k]
};

// Pairs that both keep; that either keeps. Error where the lengths or batch counts differ.
MaskSpec operator&(const MaskSpec& a, const MaskSpec& b);
MaskSpec operator|(const MaskSpec& a, const MaskSpec& b);

// Packed documents. `ids[b]` gives each position's document of batch entry b (one entry = all): 0 is padding, which
// keeps nothing and is kept by nothing; the positions of a document need not be neighbours. `inside(n)` is the mask
// of a document of n tokens, in positions counted inside it.
//
//   ids 1 1 0 2 2 1, inside causal:      j  1 1 0 2 2 1
//                                      i 1  x
//                                        1  x x
//                                        0
//                                        2        x
//                                        2        x x
//                                        1  x x       x
struct DocumentRule {
  enum class Kind : uint8_t { kFull, kCausal, kWindow, kChunked } kind = Kind::kCausal;
  int64_t left = -1, right = -1;  // kWindow
  int64_t size = 0;               // kChunked
  bool operator==(const DocumentRule&) const = default;
};
// A document in r runs can need r * (r + 1) / 2 bands; beyond kMaxBands in one list the mask is refused (Unsupported).
constexpr int64_t kMaxBands = int64_t{1} << 21;
MaskSpec documents_by_ids(const std::vector<std::vector<int64_t>>& ids, const DocumentRule& inside);
// The same from document lengths; positions after the last document are padding. Zero lengths are empty documents.
MaskSpec documents_by_lengths(int64_t seq_len, const std::vector<std::vector<int64_t>>& lengths,
                              const DocumentRule& inside);

// The one way in which work is split: the tiles of `mask` between the rows of `q` and the rows of `kv`. Together they
// keep exactly the pairs of the mask between those positions, each once. Every tile lies within one segment of each
// side, keeps something in its first and last rows and columns, and a strided segment gives one tile, not one per row.
// A tile of one row takes the stride of its columns, one of one column that of its rows.
// `unites`: bands that together are one tile between two segments become one. Without it a row's columns are cut where
// the bands are, whatever the segments.
// Cost: near the number of tiles, times a logarithm.
std::vector<Tile> intersect(const MaskSpec& mask, int64_t batch, std::span<const Segment> q,
                            std::span<const Segment> kv, bool unites = true);

}  // namespace ringspan
