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
#include "ringspan/plan/schedules/builder.h"
#include "ringspan/plan/schedules/schedules.h"

namespace ringspan::detail {
namespace {

// The buffer of each rank: the K/V of all others, in the order of the ranks.
class OthersBuffers {
 public:
  explicit OthersBuffers(const RankPlan& part) : part_(part) {
    int64_t total = 0;
    begin_.reserve(part.kv_rows.size() + 1);
    for (const int64_t rows : part.kv_rows) {
      begin_.push_back(total);
      total += rows;
    }
    begin_.push_back(total);
  }

  Operand of(int64_t holder) const {
    return {.slot = 1,
            .owner = kSeveral,
            .rows = begin_.back() - part_.kv_rows[holder],
            .head_end = part_.problem.kv_heads};
  }

  // Where the rows of `owner` begin in it.
  int64_t row_of(int64_t owner, int64_t holder) const {
    return begin_[owner] - (holder < owner ? part_.kv_rows[holder] : 0);
  }

 private:
  const RankPlan& part_;
  std::vector<int64_t> begin_;  // of each rank's rows among those of all; the end
};

std::vector<Transfer> scatter_inputs(const RankPlan& part, const OthersBuffers& buffers) {
  const std::vector<Payload> inputs = kv_inputs();
  std::vector<Transfer> transfers;
  transfers.reserve(2 * inputs.size() * static_cast<size_t>(part.world - 1));
  const auto add = [&](int64_t src, int64_t dst) {
    const Route route{.needed_by = 1,
                      .src = src,
                      .dst = dst,
                      .owner = src,
                      .from = kv_shard(part, src),
                      .to = buffers.of(dst),
                      .to_row = buffers.row_of(src, dst)};
    for (const Payload payload : inputs) {
      transfers.push_back(transfer_of(part, payload, route, {{0, part.kv_rows[src]}}));
    }
  };
  for (int64_t shift = 1; shift < part.world; ++shift) add(part.rank, wrap(part.rank + shift, part.world));
  for (int64_t shift = 1; shift < part.world; ++shift) add(wrap(part.rank - shift, part.world), part.rank);
  return transfers;
}

std::vector<Transfer> return_gradients(const RankPlan& part, const OthersBuffers& buffers) {
  const std::vector<Payload> gradients = kv_gradients();
  std::vector<Transfer> transfers;
  transfers.reserve(2 * gradients.size() * static_cast<size_t>(part.world - 1));
  const auto add = [&](int64_t src, int64_t dst) {
    const Route route{.step = 1,
                      .needed_by = 2,
                      .src = src,
                      .dst = dst,
                      .owner = dst,
                      .from = buffers.of(src),
                      .to = kv_shard(part, dst),
                      .from_row = buffers.row_of(dst, src),
                      .adds = true};
    for (const Payload payload : gradients) {
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
  const OthersBuffers buffers(part);
  if (part.world > 1) first.before = scatter_inputs(part, buffers);
  part.forward.push_back(first);
  part.backward.push_back(first);
  if (part.world == 1) return;

  std::vector<int64_t> others;
  for (int64_t rank = 0; rank < part.world; ++rank) {
    if (rank != part.rank) others.push_back(rank);
  }
  Step second{.step = 1, .q = first.q, .kv = buffers.of(part.rank)};
  second.dq.begins = false;
  second.dkv.slot = second.kv.slot;
  second.tiles = tiles_between(plan, q, rows_of(plan.kv_map(), others));
  part.forward.push_back(second);
  second.after = return_gradients(part, buffers);
  part.backward.push_back(std::move(second));
}

}  // namespace ringspan::detail
