// Everything is counted in chunks of half a contiguous shard, because both maps consist of them (3 ranks):
//
//     chunk        0 1 2 3 4 5
//     contiguous   0 0 1 1 2 2
//     head_tail    0 1 2 2 1 0
#include "ringspan/shard/advice.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace ringspan {
namespace {

constexpr int64_t kFewestRows = 64;
// Beyond, `balanced` takes 2 ms and more: it looks at every position, and at every row of every band.
constexpr int64_t kMostLookedAt = int64_t{1} << 20;
// Enough to come within a few percent of the mean for anything but work in a handful of rows. Without a bound such a
// mask takes a second.
constexpr int64_t kMostChunks = 32;

// then * 6 < now * 5, without a product that could overflow.
bool saves_over_a_sixth(int64_t now, int64_t then) { return now - then > now / 6; }

// Kept pairs of the rows [c * q_len / count, (c + 1) * q_len / count) for each c, all batch entries added up.
std::vector<int64_t> work_of_chunks(const MaskSpec& mask, int64_t count) {
  std::vector<int64_t> work(count, 0);
  for (int64_t batch = 0; batch < mask.num_lists(); ++batch) {
    for (const Band& band : mask.bands(batch)) {
      for (int64_t c = band.q_begin * count / mask.q_len(); c < count; ++c) {
        Band part = band;
        part.q_begin = std::max(band.q_begin, c * mask.q_len() / count);
        part.q_end = std::min(band.q_end, (c + 1) * mask.q_len() / count);
        work[c] += count_pairs(part);
        if (part.q_end == band.q_end) break;
      }
    }
  }
  return work;
}

int64_t looked_at(const MaskSpec& mask) {
  int64_t sum = mask.q_len();
  for (int64_t batch = 0; batch < mask.num_lists(); ++batch) {
    for (const Band& band : mask.bands(batch)) sum += band.q_end - band.q_begin;
  }
  return sum;
}

}  // namespace

std::optional<MapAdvice> better_map(const MaskSpec& mask, const ShardMap& contiguous) {
  const int64_t seq_len = contiguous.seq_len(), world = contiguous.world();
  if (mask.q_len() != seq_len || mask.kv_len() != seq_len || seq_len / world < kFewestRows) return std::nullopt;
  if (contiguous != ShardMap::contiguous(seq_len, world)) return std::nullopt;
  const std::vector<int64_t> work = work_of_chunks(mask, 2 * world);
  int64_t busiest = 0, with_head_tail = 0;
  for (int64_t rank = 0; rank < world; ++rank) {
    busiest = std::max(busiest, work[2 * rank] + work[2 * rank + 1]);
    with_head_tail = std::max(with_head_tail, work[rank] + work[2 * world - 1 - rank]);
  }
  const auto advice = [&](const char* map, int64_t then) -> std::optional<MapAdvice> {
    if (!saves_over_a_sixth(busiest, then)) return std::nullopt;
    return MapAdvice{.map = map, .busiest = busiest, .busiest_then = then};
  };
  if (const auto found = advice("head_tail", with_head_tail)) return found;
  // No map has a busiest rank below the mean.
  const int64_t mean = std::accumulate(work.begin(), work.end(), int64_t{0}) / world;
  if (!saves_over_a_sixth(busiest, mean) || looked_at(mask) > kMostLookedAt) return std::nullopt;
  return advice("balanced", std::ranges::max(ShardMap::balanced(mask, world, kMostChunks).work(mask)));
}

}  // namespace ringspan
