// pruned: rows of K/V go from their owner straight to the ranks that keep a pair with them, and no further. In step s
// rank r works on what it needs of rank r - s, so every rank has the tiles of the ring in the ring's order.
//
// Causal, head-tail, 4 ranks: rank o holds chunks o (head) and 7 - o (tail). Everybody's tail needs every head; the
// tail of o is needed by the ranks before o, which hold later tails. What a rank receives:
//              step 0        step 1        step 2        step 3
//     rank 0   own           3: 3 and 4    2: 2 and 5    1: 1 and 6
//     rank 1   own           0: 0          3: 3 and 4    2: 2 and 5
//     rank 2   own           1: 1          0: 0          3: 3 and 4
//     rank 3   own           2: 2          1: 1          0: 0
//     18 chunks instead of the ring's 24: (3 W - 3) W / 2 of 2 W (W - 1), three quarters for every W.
// Window masks: the neighbours' last rows only, however many ranks there are. Documents: ranks that share one.
//
// Gradients of the rows that came go back to the owner the same way and are added there, one step later than the
// ring's.
//
// Messages a rank sends, K and V counted apart:   forward 2, backward 4 for each rank that needs something of it.
// Bytes: each row that travels, travels once to each rank that needs it. Memory: as the ring, K/V twice, and their
// gradients twice, of at most one shard each.
#include <algorithm>

#include "ringspan/plan/schedules/builder.h"
#include "ringspan/plan/schedules/schedules.h"

namespace ringspan::detail {
namespace {

// The rows of one owner that another rank's tiles read, packed one after the other.
struct Need {
  std::vector<Tile> tiles{};  // rows of K/V count in the packed buffer
  std::vector<RowRange> rows{};
  int64_t num_rows = 0;
};

std::vector<RowRange> kv_rows_of(const std::vector<Tile>& tiles) {
  std::vector<RowRange> rows;
  for (const Tile& tile : tiles) rows.push_back({tile.kv_row0, tile.kv_row0 + tile.kv_rows});
  std::sort(rows.begin(), rows.end(), [](const RowRange& a, const RowRange& b) { return a.begin < b.begin; });
  std::vector<RowRange> joined;
  for (const RowRange& range : rows) {
    if (!joined.empty() && range.begin <= joined.back().end) {
      joined.back().end = std::max(joined.back().end, range.end);
    } else {
      joined.push_back(range);
    }
  }
  return joined;
}

Need need_of(const Plan& plan, int64_t rank, int64_t owner) {
  Need need{.tiles = tiles_between(plan, rows_of(plan.q_map(), rank), rows_of(plan.kv_map(), owner))};
  need.rows = kv_rows_of(need.tiles);
  std::vector<int64_t> packed;  // where each range begins
  for (const RowRange& range : need.rows) {
    packed.push_back(need.num_rows);
    need.num_rows += range.end - range.begin;
  }
  for (Tile& tile : need.tiles) {
    const auto after = std::partition_point(need.rows.begin(), need.rows.end(),
                                            [&](const RowRange& range) { return range.begin <= tile.kv_row0; });
    const auto index = static_cast<size_t>(after - need.rows.begin()) - 1;
    tile.kv_row0 += packed[index] - need.rows[index].begin;
  }
  return need;
}

class PrunedWriter {
 public:
  PrunedWriter(const Plan& plan, RankPlan& part) : plan_(plan), part_(part) {}

  void write() {
    // At home all rows are there; nothing is packed.
    Need need{.tiles = tiles_between(plan_, rows_of(plan_.q_map(), part_.rank), rows_of(plan_.kv_map(), part_.rank))};
    for (int64_t s = 0; s < part_.world; ++s) {
      const int64_t owner = wrap(part_.rank - s, part_.world);
      Step step{.step = s, .q = own_q(part_), .kv = s == 0 ? own_kv(part_) : visitor(s, owner, need.num_rows)};
      step.dq.begins = s == 0;
      step.dkv.slot = step.kv.slot;
      step.tiles = std::move(need.tiles);
      const std::vector<RowRange> visited = need.rows;
      if (s + 1 < part_.world) {
        need = need_of(plan_, part_.rank, wrap(owner - 1, part_.world));
        add_inputs(step, need);
      }
      part_.forward.push_back(step);
      if (s > 0) add_gradients(step, visited);
      part_.backward.push_back(std::move(step));
    }
  }

 private:
  Operand visitor(int64_t s, int64_t owner, int64_t rows) const {
    return {.slot = 2 - s % 2, .owner = owner, .rows = rows, .head_end = part_.problem.kv_heads};
  }

  // What step s + 1 needs: sent to the rank that works on this rank's rows then, received from the one before.
  void add_inputs(Step& step, const Need& mine) const {
    const int64_t next = step.step + 1, dst = wrap(part_.rank + next, part_.world);
    const Need theirs = need_of(plan_, dst, part_.rank);
    for (const bool sends : {true, false}) {
      const Need& need = sends ? theirs : mine;
      const int64_t src = sends ? part_.rank : wrap(part_.rank - next, part_.world);
      const Route route{.step = step.step,
                        .needed_by = next,
                        .src = src,
                        .dst = sends ? dst : part_.rank,
                        .owner = src,
                        .from = kv_shard(part_, src),
                        .to = visitor(next, src, need.num_rows)};
      for (const Payload payload : kv_inputs()) step.before.push_back(transfer_of(part_, payload, route, need.rows));
    }
  }

  // Home from this step; what others have for this rank's rows comes at the same time. The slot is used again two steps
  // later.
  void add_gradients(Step& step, const std::vector<RowRange>& mine) const {
    const int64_t s = step.step, other = wrap(part_.rank + s, part_.world);
    const Need theirs = need_of(plan_, other, part_.rank);
    for (const bool sends : {true, false}) {
      const std::vector<RowRange>& rows = sends ? mine : theirs.rows;
      const int64_t owner = sends ? step.kv.owner : part_.rank;
      const Route route{.step = s,
                        .needed_by = std::min(s + 2, part_.world),
                        .src = sends ? part_.rank : other,
                        .dst = owner,
                        .owner = owner,
                        .from = visitor(s, owner, sends ? step.kv.rows : theirs.num_rows),
                        .to = kv_shard(part_, owner),
                        .adds = true};
      for (const Payload payload : kv_gradients()) step.after.push_back(transfer_of(part_, payload, route, rows));
    }
  }

  const Plan& plan_;
  RankPlan& part_;
};

}  // namespace

void build_pruned(const Plan& plan, RankPlan& part) { PrunedWriter(plan, part).write(); }

}  // namespace ringspan::detail
