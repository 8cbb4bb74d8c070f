// double_ring over W = 4 ranks, nodes of I = 2: ranks 0, 1 and ranks 2, 3. Within a node K/V go round in each of R = W
// / I rounds; between nodes they move once a round, straight from the round's first step, so that a slow link has a
// whole round's time. KVo is the K/V of rank o in slot [n]; `>` to the next rank of the node, `>>` to the same place
// of the next node.
//
//              round 0                                round 1
//              step 0                step 1           step 2           step 3
//     rank 0   KV0 [0] > 1, >> 2     KV1 [1]          KV2 [4] > 1      KV3 [1]
//     rank 1   KV1 [0] > 0, >> 3     KV0 [1]          KV3 [4] > 0      KV2 [1]
//     rank 2   KV2 [0] > 3, >> 0     KV3 [1]          KV0 [4] > 3      KV1 [1]
//     rank 3   KV3 [0] > 2, >> 1     KV2 [1]          KV1 [4] > 2      KV0 [1]
//
// Backward: gradients go round the node behind K/V and end, after I hops, in the place of their owner, where they are
// added to what the other nodes have sent of them so far. That sum moves to the next node during the next round, and
// home after the last one.
//
// Messages a rank sends, K and V counted apart:   forward 2 R (I - 1) inside its node and 2 (R - 1) out of it;
//     backward as many, and gradients 2 R I inside and 2 R out.
// Bytes out of a node, shards of n rows: (R - 1) I shards from each node, by all of its ranks at once. A plain ring
//     sends W - 1 shards out of each node through one rank.
// Memory: K/V four times and their gradients four times, of one shard each.
#include <utility>

#include "ringspan/plan/schedules/ring.h"
#include "ringspan/plan/schedules/schedules.h"

namespace ringspan::detail {
namespace {

class DoubleRingWriter {
 public:
  DoubleRingWriter(const Plan& plan, const RankPlan& part, int64_t size)
      : plan_(plan), part_(part), size_(size), rounds_(part.world / size) {}

  std::vector<Step> forward() const {
    std::vector<Step> steps;
    for (int64_t s = 0; s < part_.world; ++s) steps.push_back(step(s));
    return steps;
  }

  std::vector<Step> backward() const {
    std::vector<Step> steps = forward();
    for (Step& step : steps) add_gradients(step);
    Step last{.step = part_.world, .computes = false, .q = own_q(part_), .kv = own_kv(part_)};
    outward(kv_gradients(), last.step, {last.step + 1, rounds_ - 1, sum_slot(rounds_ - 1), kOwnSlot}, last.after);
    steps.push_back(std::move(last));
    return steps;
  }

 private:
  int64_t round_of(int64_t s) const { return s / size_; }
  int64_t turn_of(int64_t s) const { return s % size_; }
  int64_t node() const { return part_.rank / size_; }
  int64_t place() const { return part_.rank % size_; }

  int64_t rank_at(int64_t node, int64_t place) const { return wrap(node, rounds_) * size_ + wrap(place, size_); }

  // Whose K/V a rank works on.
  int64_t owner_at(int64_t node, int64_t place, int64_t round, int64_t turn) const {
    return rank_at(node - round, place - turn);
  }

  int64_t input_slot(int64_t round, int64_t turn) const {
    if (turn > 0) return 2 - turn % 2;
    return round == 0 ? kOwnSlot : 3 + round % 2;
  }
  int64_t gradient_slot(int64_t turn) const { return 1 + turn % 2; }
  int64_t sum_slot(int64_t round) const { return 3 + round % 2; }

  Step step(int64_t s) const {
    const int64_t round = round_of(s), turn = turn_of(s), owner = owner_at(node(), place(), round, turn);
    Step step{.step = s, .q = own_q(part_), .kv = kv_shard(part_, owner, input_slot(round, turn))};
    step.dq.begins = s == 0;
    step.dkv = {.slot = gradient_slot(turn), .begins = turn == 0};
    step.tiles = tiles_between(plan_, rows_of(plan_.q_map(), part_.rank), rows_of(plan_.kv_map(), owner));
    if (turn + 1 < size_) {
      inward(kv_inputs(), s, input_slot(round, turn), input_slot(round, turn + 1), false, step.before);
    }
    if (turn == 0 && round + 1 < rounds_) {
      outward(kv_inputs(), s, {s + size_, round, input_slot(round, 0), input_slot(round + 1, 0)}, step.before);
    }
    return step;
  }

  void add_gradients(Step& step) const {
    const int64_t round = round_of(step.step), turn = turn_of(step.step);
    if (turn == 0 && round > 0) {
      outward(kv_gradients(), step.step, {step.step + size_, round - 1, sum_slot(round - 1), sum_slot(round)},
              step.after);
    }
    const bool comes_back = turn + 1 == size_;
    inward(kv_gradients(), step.step, gradient_slot(turn), comes_back ? sum_slot(round) : gradient_slot(turn + 1),
           comes_back && round > 0, step.after);
  }

  // To the next place of the node, for the next step.
  void inward(const std::vector<Payload>& payloads, int64_t s, int64_t src_slot, int64_t dst_slot, bool adds,
              std::vector<Transfer>& transfers) const {
    for (const int64_t src_place : {place(), wrap(place() - 1, size_)}) {
      const int64_t owner = owner_at(node(), src_place, round_of(s), turn_of(s));
      hop(payloads,
          {.step = s,
           .needed_by = s + 1,
           .src = rank_at(node(), src_place),
           .dst = rank_at(node(), src_place + 1),
           .owner = owner,
           .from = kv_shard(part_, owner, src_slot),
           .to = kv_shard(part_, owner, dst_slot),
           .adds = adds},
          transfers);
    }
  }

  // What goes to the next node has its owner `round` nodes before.
  struct Crossing {
    int64_t needed_by, round, src_slot, dst_slot;
  };

  // To the same place of the next node.
  void outward(const std::vector<Payload>& payloads, int64_t s, const Crossing& crossing,
               std::vector<Transfer>& transfers) const {
    for (const int64_t src_node : {node(), wrap(node() - 1, rounds_)}) {
      const int64_t owner = owner_at(src_node, place(), crossing.round, 0);
      hop(payloads,
          {.step = s,
           .needed_by = crossing.needed_by,
           .src = rank_at(src_node, place()),
           .dst = rank_at(src_node + 1, place()),
           .owner = owner,
           .from = kv_shard(part_, owner, crossing.src_slot),
           .to = kv_shard(part_, owner, crossing.dst_slot)},
          transfers);
    }
  }

  void hop(const std::vector<Payload>& payloads, const Route& route, std::vector<Transfer>& transfers) const {
    for (const Payload payload : payloads) {
      transfers.push_back(transfer_of(part_, payload, route, {{0, part_.kv_rows[route.owner]}}));
    }
  }

  const Plan& plan_;
  const RankPlan& part_;
  int64_t size_, rounds_;
};

}  // namespace

void build_double_ring(const Plan& plan, RankPlan& part) {
  const int64_t node_size = plan.schedule().inner;
  if (node_size == 1 || node_size == part.world) {
    return build_ring(plan, part);
  }
  const DoubleRingWriter writer(plan, part, node_size);
  part.forward = writer.forward();
  part.backward = writer.backward();
}

}  // namespace ringspan::detail
