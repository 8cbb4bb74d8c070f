// Why counting proves it: a tile lies in the mask when the bands, which are disjoint, keep as many of its pairs as it
// has. Tiles in the mask that are disjoint and together have as many pairs as the mask keeps, for every head, keep
// exactly those. Nothing is enumerated.
#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "ringspan/plan/proof/proof.h"

namespace ringspan::detail {
namespace {

// begin, begin + stride, ..., `count` of them.
struct Progression {
  int64_t begin = 0, stride = 1, count = 0;
  int64_t last() const { return begin + (count - 1) * stride; }
};

Progression q_positions(const Tile& tile) { return {tile.q_pos0, tile.q_rows > 1 ? tile.q_stride : 1, tile.q_rows}; }
Progression kv_positions(const Tile& tile) {
  return {tile.kv_pos0, tile.kv_rows > 1 ? tile.kv_stride : 1, tile.kv_rows};
}

// The positions that both have; nothing where there are none.
std::optional<Progression> common(const Progression& a, const Progression& b) {
  const int64_t stride = std::lcm(a.stride, b.stride), from = std::max(a.begin, b.begin);
  const int64_t to = std::min(a.last(), b.last());
  // The first term of `a` from there on, and then one of them in each period that `b` has too.
  int64_t first = a.begin + (from - a.begin + a.stride - 1) / a.stride * a.stride;
  const int64_t limit = first + stride;
  while (first < limit && (first - b.begin) % b.stride != 0) first += a.stride;
  if (first >= limit || first > to) return std::nullopt;
  return Progression{first, stride, (to - first) / stride + 1};
}

bool overlap(const Tile& a, const Tile& b) {
  const auto q = common(q_positions(a), q_positions(b)), kv = common(kv_positions(a), kv_positions(b));
  if (!q || !kv) return false;
  return count_pairs({.q_rows = q->count,
                      .q_pos0 = q->begin,
                      .q_stride = q->stride,
                      .kv_rows = kv->count,
                      .kv_pos0 = kv->begin,
                      .kv_stride = kv->stride,
                      .lo = std::max(a.lo, b.lo),
                      .hi = std::min(a.hi, b.hi)}) > 0;
}

int64_t count_kept(const MaskSpec& mask, int64_t batch, const Tile& tile) {
  int64_t kept = 0;
  for (const Band& band : mask.bands_meeting(batch, tile.q_pos0, q_positions(tile).last() + 1)) {
    kept += count_pairs(intersect(tile, band));
  }
  return kept;
}

// Kept pairs of all query positions that some rank holds.
int64_t count_expected(const Plan& plan, const MaskSpec& mask, int64_t batch) {
  int64_t expected = 0;
  for (int64_t rank = 0; rank < plan.world(); ++rank) {
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
  }
  return expected;
}

class PairProof {
 public:
  PairProof(const Plan& plan, const MaskSpec& mask, Pass pass, Faults& faults)
      : plan_(plan), mask_(mask), pass_(pass), faults_(faults) {}

  void prove(std::vector<Work> work) {
    // Whose rows they are tells most tiles apart, but not from those of a buffer of several owners.
    const bool is_mixed = std::any_of(
        work.begin(), work.end(), [](const Work& one) { return one.q_owner == kSeveral || one.kv_owner == kSeveral; });
    std::map<std::tuple<int64_t, int64_t, int64_t>, std::vector<const Work*>> groups;
    std::vector<int64_t> pairs(plan_.problem().batch, 0);
    for (const Work& one : work) {
      const int64_t count = count_pairs(one.tile), kept = count_kept(mask_, one.tile.batch, one.tile);
      if (count != kept) {
        faults_.add(name(one), " has ", count, " pairs, of which the mask keeps ", kept);
      }
      pairs[one.tile.batch] += count * (one.head_end - one.head_begin);
      groups[{one.tile.batch, is_mixed ? kSeveral : one.q_owner, is_mixed ? kSeveral : one.kv_owner}].push_back(&one);
    }
    for (auto& [key, tiles] : groups) {
      std::stable_sort(tiles.begin(), tiles.end(),
                       [](const Work* a, const Work* b) { return a->tile.q_pos0 < b->tile.q_pos0; });
      prove_disjoint(tiles);
    }
    compare(pairs);
  }

 private:
  std::string name(const Work& work) const {
    return concat("rank ", work.rank, pass_ == Pass::kForward ? " forward" : " backward", " step ", work.step,
                  ": the tile at query position ", work.tile.q_pos0, ", K/V position ", work.tile.kv_pos0);
  }

  // Sweeps over the tiles by first position.
  void prove_disjoint(const std::vector<const Work*>& tiles) {
    std::vector<const Work*> active;
    for (const Work* one : tiles) {
      std::erase_if(active, [&](const Work* other) { return q_positions(other->tile).last() < one->tile.q_pos0; });
      for (const Work* other : active) {
        const bool shares_heads = other->head_begin < one->head_end && one->head_begin < other->head_end;
        if (!shares_heads || !overlap(other->tile, one->tile)) continue;
        faults_.add(name(*one), " repeats pairs of the one at ", other->tile.q_pos0, ", ", other->tile.kv_pos0,
                    " of rank ", other->rank, " step ", other->step);
      }
      active.push_back(one);
    }
  }

  void compare(const std::vector<int64_t>& pairs) {
    const bool one_list = mask_.num_lists() == 1 && plan_.q_map().num_lists() == 1;
    int64_t expected = 0;
    for (int64_t batch = 0; batch < plan_.problem().batch; ++batch) {
      if (batch == 0 || !one_list) expected = count_expected(plan_, mask_, batch) * plan_.problem().q_heads;
      if (pairs[batch] == expected) continue;
      faults_.add(pass_ == Pass::kForward ? "forward" : "backward", ": computes ", pairs[batch],
                  " pairs of batch entry ", batch, " over all heads, the mask keeps ", expected);
    }
  }

  const Plan& plan_;
  const MaskSpec& mask_;
  Pass pass_;
  Faults& faults_;
};

}  // namespace

void prove_pairs(const Plan& plan, const MaskSpec& mask, Pass pass, std::vector<Work> work, Faults& faults) {
  PairProof(plan, mask, pass, faults).prove(std::move(work));
}

}  // namespace ringspan::detail
