// Why counting proves it: a tile lies in the mask when the bands, which are disjoint, keep as many of its pairs as it
// has. Tiles in the mask that are disjoint and together have as many pairs as the mask keeps for these rows keep
// exactly those. Nothing is enumerated.
#include <algorithm>
#include <utility>

#include "ringspan/plan/proof.h"

namespace ringspan::detail {
namespace {

struct PlacedTile {
  const Tile* tile;
  const Step* step;
};

// Whether local rows [row0, row0 + rows) are these positions: all within one segment.
bool lies_in(std::span<const Segment> segments, int64_t row0, int64_t rows, int64_t pos0, int64_t stride) {
  const auto after = std::partition_point(segments.begin(), segments.end(),
                                          [&](const Segment& segment) { return segment.local_row <= row0; });
  if (after == segments.begin() || rows < 1) return false;
  const Segment& segment = *(after - 1);
  const int64_t offset = row0 - segment.local_row;
  return offset + rows <= segment.length && segment.position(offset) == pos0 && (rows == 1 || segment.stride == stride);
}

int64_t count_kept(const MaskSpec& mask, int64_t batch, const Tile& tile) {
  int64_t kept = 0;
  const int64_t q_end = tile.q_pos0 + (tile.q_rows - 1) * tile.q_stride + 1;
  for (const Band& band : mask.bands_meeting(batch, tile.q_pos0, q_end)) {
    const Tile common = intersect(tile, band);
    kept += count_pairs(common);
  }
  return kept;
}

// Kept pairs of all rows of a rank with the whole K/V sequence.
int64_t count_expected(const Plan& plan, const MaskSpec& mask, int64_t rank, int64_t batch) {
  int64_t expected = 0;
  for (const Segment& rows : plan.q_map().segments(rank, batch)) {
    const Tile all{.batch = batch,
                   .q_row0 = rows.local_row,
                   .q_rows = rows.length,
                   .q_pos0 = rows.begin,
                   .q_stride = rows.stride,
                   .kv_rows = mask.kv_len(),
                   .lo = -kNoDiagonal,
                   .hi = kNoDiagonal};
    if (all.kv_rows > 0) expected += count_kept(mask, batch, all);
  }
  return expected;
}

// Tiles of the same rank, owner and batch entry. A side of one row has no stride of its own.
bool overlap(const Tile& a, const Tile& b) {
  Tile common = a;
  common.q_stride = a.q_rows > 1 ? a.q_stride : b.q_stride;
  common.kv_stride = a.kv_rows > 1 ? a.kv_stride : b.kv_stride;
  common.q_row0 = std::max(a.q_row0, b.q_row0);
  common.kv_row0 = std::max(a.kv_row0, b.kv_row0);
  common.q_rows = std::min(a.q_row0 + a.q_rows, b.q_row0 + b.q_rows) - common.q_row0;
  common.kv_rows = std::min(a.kv_row0 + a.kv_rows, b.kv_row0 + b.kv_rows) - common.kv_row0;
  common.q_pos0 = a.q_pos0 + (common.q_row0 - a.q_row0) * common.q_stride;
  common.kv_pos0 = a.kv_pos0 + (common.kv_row0 - a.kv_row0) * common.kv_stride;
  common.lo = std::max(a.lo, b.lo);
  common.hi = std::min(a.hi, b.hi);
  return count_pairs(common) > 0;
}

bool is_placed(const Plan& plan, const Phase& phase, const Step& step, const Tile& tile, Faults& faults) {
  if (tile.batch < 0 || tile.batch >= plan.problem().batch) {
    faults.add(phase.where(step), ": a tile has batch entry ", tile.batch, " of ", plan.problem().batch);
    return false;
  }
  const bool q_fits =
      lies_in(plan.q_map().segments(phase.part.rank, tile.batch), tile.q_row0, tile.q_rows, tile.q_pos0, tile.q_stride);
  const bool kv_fits = lies_in(plan.kv_map().segments(step.kv_owner, tile.batch), tile.kv_row0, tile.kv_rows,
                               tile.kv_pos0, tile.kv_stride);
  if (!q_fits) {
    faults.add(phase.where(step), ": query rows ", tile.q_row0, " + ", tile.q_rows, " are not positions ", tile.q_pos0,
               " by ", tile.q_stride, " of rank ", phase.part.rank);
  }
  if (!kv_fits) {
    faults.add(phase.where(step), ": K/V rows ", tile.kv_row0, " + ", tile.kv_rows, " are not positions ", tile.kv_pos0,
               " by ", tile.kv_stride, " of rank ", step.kv_owner);
  }
  return q_fits && kv_fits;
}

// Sweeps over the tiles of one owner and batch entry by first row.
void prove_disjoint(const Phase& phase, std::span<const PlacedTile> tiles, Faults& faults) {
  std::vector<PlacedTile> active;
  for (const PlacedTile& placed : tiles) {
    std::erase_if(active, [&](const PlacedTile& other) {
      return other.tile->q_row0 + other.tile->q_rows <= placed.tile->q_row0;
    });
    for (const PlacedTile& other : active) {
      if (!overlap(*other.tile, *placed.tile)) continue;
      faults.add(phase.where(*placed.step), ": the tile at query row ", placed.tile->q_row0, ", K/V row ",
                 placed.tile->kv_row0, " repeats pairs of the one at ", other.tile->q_row0, ", ", other.tile->kv_row0,
                 " of step ", other.step->step);
    }
    active.push_back(placed);
  }
}

}  // namespace

void prove_pairs(const Plan& plan, const MaskSpec& mask, const Phase& phase, Faults& faults) {
  std::map<std::pair<int64_t, int64_t>, std::vector<PlacedTile>> groups;  // by owner and batch entry
  std::vector<int64_t> pairs(plan.problem().batch, 0);
  for (const Step& step : phase.steps) {
    if (step.kv_owner < 0 || step.kv_owner >= phase.part.world) {
      faults.add(phase.where(step), ": the K/V owner is rank ", step.kv_owner, " of ", phase.part.world);
      continue;
    }
    for (const Tile& tile : step.tiles) {
      if (!is_placed(plan, phase, step, tile, faults)) continue;
      const int64_t count = count_pairs(tile), kept = count_kept(mask, tile.batch, tile);
      if (count != kept) {
        faults.add(phase.where(step), ": the tile at query row ", tile.q_row0, ", K/V row ", tile.kv_row0, " has ",
                   count, " pairs, of which the mask keeps ", kept);
      }
      pairs[tile.batch] += count;
      groups[{step.kv_owner, tile.batch}].push_back({&tile, &step});
    }
  }
  for (auto& [key, tiles] : groups) {
    std::stable_sort(tiles.begin(), tiles.end(),
                     [](const PlacedTile& a, const PlacedTile& b) { return a.tile->q_row0 < b.tile->q_row0; });
    prove_disjoint(phase, tiles, faults);
  }
  const bool one_list = mask.num_lists() == 1 && plan.q_map().num_lists() == 1;
  int64_t expected = 0;
  for (int64_t batch = 0; batch < plan.problem().batch; ++batch) {
    if (batch == 0 || !one_list) expected = count_expected(plan, mask, phase.part.rank, batch);
    if (pairs[batch] == expected) continue;
    faults.add("rank ", phase.part.rank, " ", phase.name, ": computes ", pairs[batch], " pairs of batch entry ", batch,
               ", the mask keeps ", expected);
  }
}

}  // namespace ringspan::detail
