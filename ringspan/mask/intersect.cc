// intersect: how a mask meets two lists of segments. Four positions a rank, head-tail on two ranks, causal; the rows
// of rank 0 (positions 0 1 6 7) with the K/V of rank 1 (positions 2 3 4 5) give one tile:
//
//                 j   2 3 4 5          q segments  {row 0, begin 0}, {row 2, begin 6}
//      row 0   i  0                    kv segment  {row 0, begin 2}
//      row 1      1
//      row 2      6   x x x x   <- {q_row0 2, q_rows 2, kv_row0 0, kv_rows 4}
//      row 3      7   x x x x
#include <algorithm>
#include <cstdint>
#include <numeric>

#include "ringspan/mask/mask_spec.h"
#include "ringspan/mask/tile.h"

namespace ringspan {
namespace {

int64_t last_position(const Segment& segment) { return segment.position(segment.length - 1); }

// Finds the segments that may hold a position of a range. Segments may interleave (strides), so beside the order by
// first position the largest last position so far is kept.
class SegmentIndex {
 public:
  explicit SegmentIndex(std::span<const Segment> segments) : segments_(segments), order_(segments.size()) {
    std::iota(order_.begin(), order_.end(), size_t{0});
    const auto begins_before = [&](size_t a, size_t b) { return segments[a].begin < segments[b].begin; };
    if (!std::is_sorted(order_.begin(), order_.end(), begins_before)) {
      std::sort(order_.begin(), order_.end(), begins_before);
    }
    reach_.reserve(order_.size());
    for (size_t index : order_) {
      const int64_t last = last_position(segments[index]);
      reach_.push_back(reach_.empty() ? last : std::max(reach_.back(), last));
    }
  }

  // Indices of the candidates for positions [begin, end).
  std::span<const size_t> meeting(int64_t begin, int64_t end) const {
    const auto first = std::lower_bound(reach_.begin(), reach_.end(), begin) - reach_.begin();
    const auto last =
        std::partition_point(order_.begin(), order_.end(), [&](size_t index) { return segments_[index].begin < end; }) -
        order_.begin();
    return first < last ? std::span(order_).subspan(first, last - first) : std::span<const size_t>();
  }

 private:
  std::span<const Segment> segments_;
  std::vector<size_t> order_;
  std::vector<int64_t> reach_;
};

Tile whole_tile(int64_t batch, const Segment& q, const Segment& kv) {
  return {.batch = batch,
          .q_row0 = q.local_row,
          .q_rows = q.length,
          .q_pos0 = q.begin,
          .q_stride = q.stride,
          .kv_row0 = kv.local_row,
          .kv_rows = kv.length,
          .kv_pos0 = kv.begin,
          .kv_stride = kv.stride,
          .lo = -kNoDiagonal,
          .hi = kNoDiagonal};
}

// Two disjoint tiles of one pair of segments as one, if together they are a tile. Only for equal strides, where the
// count is cheap and tiles are lattice bands.
bool unite(Tile& a, const Tile& b) {
  if (a.q_stride != a.kv_stride) return false;
  if (a.q_row0 > b.q_row0 + b.q_rows || b.q_row0 > a.q_row0 + a.q_rows) return false;
  if (a.kv_row0 > b.kv_row0 + b.kv_rows || b.kv_row0 > a.kv_row0 + a.kv_rows) return false;
  Tile hull = a;
  hull.q_row0 = std::min(a.q_row0, b.q_row0);
  hull.q_pos0 = std::min(a.q_pos0, b.q_pos0);
  hull.q_rows = std::max(a.q_row0 + a.q_rows, b.q_row0 + b.q_rows) - hull.q_row0;
  hull.kv_row0 = std::min(a.kv_row0, b.kv_row0);
  hull.kv_pos0 = std::min(a.kv_pos0, b.kv_pos0);
  hull.kv_rows = std::max(a.kv_row0 + a.kv_rows, b.kv_row0 + b.kv_rows) - hull.kv_row0;
  hull.lo = std::min(a.lo, b.lo);
  hull.hi = std::max(a.hi, b.hi);
  if (count_pairs(hull) != count_pairs(a) + count_pairs(b)) return false;
  a = hull;
  return true;
}

// A single row or column has no stride of its own; with the other side's the tile is a lattice band.
void settle_stride(Tile& tile) {
  if (tile.q_rows == 1 && tile.kv_rows == 1) tile.q_stride = tile.kv_stride = 1;
  if (tile.q_rows == 1) tile.q_stride = tile.kv_stride;
  if (tile.kv_rows == 1) tile.kv_stride = tile.q_stride;
}

}  // namespace

std::vector<Tile> intersect(const MaskSpec& mask, int64_t batch, std::span<const Segment> q,
                            std::span<const Segment> kv, bool unites) {
  std::vector<Tile> tiles;
  const SegmentIndex kv_index(kv);
  std::vector<size_t> latest(kv.size(), SIZE_MAX);  // where the last tile with each kv segment lies in `tiles`
  for (const Segment& rows : q) {
    const size_t first = tiles.size();
    for (const Band& band : mask.bands_meeting(batch, rows.begin, last_position(rows) + 1)) {
      const int64_t q_first = std::max(band.q_begin, rows.begin);
      const int64_t q_last = std::min(band.q_end - 1, last_position(rows));
      const int64_t kv_begin = std::max(band.kv_begin, q_first + band.lo);
      const int64_t kv_end = std::min(band.kv_end, q_last + band.hi + 1);
      if (q_first > q_last || kv_begin >= kv_end) continue;
      for (size_t index : kv_index.meeting(kv_begin, kv_end)) {
        const Tile tile = intersect(whole_tile(batch, rows, kv[index]), band);
        if (tile.q_rows == 0) continue;
        const size_t previous = latest[index];
        if (unites && previous >= first && previous < tiles.size() && unite(tiles[previous], tile)) continue;
        latest[index] = tiles.size();
        tiles.push_back(tile);
      }
    }
  }
  for (Tile& tile : tiles) settle_stride(tile);
  return tiles;
}

}  // namespace ringspan
