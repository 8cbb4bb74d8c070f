// gather over W = 3 ranks: everybody's K/V travel at once while a rank works on its own; the rest is one step. KV-o is
// the K/V of all ranks but o, in the order of the ranks.
//
//              step 0               step 1            backward, after step 1
//     rank 0   KV0 [0] > 1, 2       KV-0 [1]          dKV1 >> 1, dKV2 >> 2
//     rank 1   KV1 [0] > 0, 2       KV-1 [1]          dKV0 >> 0, dKV2 >> 2
//     rank 2   KV2 [0] > 0, 1       KV-2 [1]          dKV0 >> 0, dKV1 >> 1
//
// Gradients of the other ranks' K/V gather in [1] and go straight home, where they are added to what step 0 left there.
//
// Messages a rank sends, K and V counted apart:   forward 2 (W - 1), backward 4 (W - 1); none where W = 1.
// Bytes:    forward   W - 1 times its own shard; backward as much, and once the gradients of all other shards.
// Memory:   the K/V (backward: and their gradients) of all ranks. One exchange in place of W - 1: for small shards.
#include "ringspan/plan/gather.h"

namespace ringspan::detail {
namespace {

// The buffer of rank `holder`: where the rows of `owner` begin in it, and the whole.
struct Others {
  Operand operand{};
  std::vector<int64_t> row_of{};
};

Others others_of(const RankPlan& part, int64_t holder) {
  Others others{.operand = {.slot = 1, .owner = kSeveral, .head_end = part.problem.kv_heads}};
  for (int64_t owner = 0; owner < part.world; ++owner) {
    others.row_of.push_back(others.operand.rows);
    if (owner != holder) others.operand.rows += part.kv_rows[owner];
  }
  return others;
}

std::vector<Transfer> scatter_inputs(const RankPlan& part) {
  std::vector<Transfer> transfers;
  const auto add = [&](int64_t src, int64_t dst) {
    const Others others = others_of(part, dst);
    const Route route{.needed_by = 1,
                      .src = src,
                      .dst = dst,
                      .owner = src,
                      .from = kv_shard(part, src),
                      .to = others.operand,
                      .to_row = others.row_of[src]};
    for (const Payload payload : kv_inputs()) {
      transfers.push_back(transfer_of(part, payload, route, {{0, part.kv_rows[src]}}));
    }
  };
  for (int64_t shift = 1; shift < part.world; ++shift) add(part.rank, wrap(part.rank + shift, part.world));
  for (int64_t shift = 1; shift < part.world; ++shift) add(wrap(part.rank - shift, part.world), part.rank);
  return transfers;
}

std::vector<Transfer> return_gradients(const RankPlan& part) {
  std::vector<Transfer> transfers;
  const auto add = [&](int64_t src, int64_t dst) {
    const Others others = others_of(part, src);
    const Route route{.step = 1,
                      .needed_by = 2,
                      .src = src,
                      .dst = dst,
                      .owner = dst,
                      .from = others.operand,
                      .to = kv_shard(part, dst),
                      .from_row = others.row_of[dst],
                      .adds = true};
    for (const Payload payload : kv_gradients()) {
      transfers.push_back(transfer_of(part, payload, route, {{0, part.kv_rows[dst]}}));
    }
  };
  for (int64_t shift = 1; shift < part.world; ++shift) add(part.rank, wrap(part.rank - shift, part.world));
  for (int64_t shift = 1; shift < part.world; ++shift) add(wrap(part.rank + shift, part.world), part.rank);
  return transfers;
}

}  // namespace

void build_gather(const Plan& plan, RankPlan& part) {
  const Rows q = rows_of(plan.q_map(), part.rank);
  Step first{.q = own_q(part), .kv = own_kv(part)};
  first.tiles = tiles_between(plan, q, rows_of(plan.kv_map(), part.rank));
  if (part.world > 1) first.before = scatter_inputs(part);
  part.forward.push_back(first);
  part.backward.push_back(first);
  if (part.world == 1) return;

  std::vector<int64_t> others;
  for (int64_t rank = 0; rank < part.world; ++rank) {
    if (rank != part.rank) others.push_back(rank);
  }
  Step second{.step = 1, .q = first.q, .kv = others_of(part, part.rank).operand};
  second.dq.begins = false;
  second.dkv.slot = second.kv.slot;
  second.tiles = tiles_between(plan, q, rows_of(plan.kv_map(), others));
  part.forward.push_back(second);
  second.after = return_gradients(part);
  part.backward.push_back(std::move(second));
}

}  // namespace ringspan::detail
