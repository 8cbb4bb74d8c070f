// The ring over W = 3 ranks. KVo is the K/V of rank o in slot [n], dKVo their gradient. `>` posts to the next rank
// before the tiles of the step are computed, `>>` after.
//
// Forward: W - 1 hops of K and V.
//              step 0          step 1          step 2
//     rank 0   KV0 [0] >       KV2 [1] >       KV1 [2]
//     rank 1   KV1 [0] >       KV0 [1] >       KV2 [2]
//     rank 2   KV2 [0] >       KV1 [1] >       KV0 [2]
//
// Backward: K/V as above. In step s rank r adds to the gradient of owner r - s what the rank before has sent in s - 1.
//     kFromOwner, W hops: the slots are [1 + s % 2], and the last hop brings the whole gradient home.
//              step 0          step 1          step 2
//     rank 0   dKV0 [1] >>     dKV2 [2] >>     dKV1 [1] >>    then dKV0 in [0]
//     rank 1   dKV1 [1] >>     dKV0 [2] >>     dKV2 [1] >>    then dKV1 in [0]
//     rank 2   dKV2 [1] >>     dKV1 [2] >>     dKV0 [1] >>    then dKV2 in [0]
//     kFromNext, W - 1 hops: step 0 stays at home in [0], the others use [2 - s % 2]; the last hop adds to [0].
//              step 0          step 1          step 2
//     rank 0   dKV0 [0]        dKV2 [1] >>     dKV1 [2] >>    then + dKV0 in [0]
//     rank 1   dKV1 [0]        dKV0 [1] >>     dKV2 [2] >>    then + dKV1 in [0]
//     rank 2   dKV2 [0]        dKV1 [1] >>     dKV0 [2] >>    then + dKV2 in [0]
//
// Messages a rank sends, K and V counted apart:   forward 2 (W - 1),
//     backward 2 (W - 1) + 2 W (kFromOwner) or 4 (W - 1) (kFromNext); none where W = 1.
// Bytes of one hop of equal shards of n rows:     batch * kv_heads * n * (qk_dim + v_dim) * element size,
//     gradients with the accumulator's element size. Shards of other lengths pass through every rank too, so over
//     all hops each rank sends what all but one of the shards hold (all of them for W gradient hops).
//
// "q_ring" has the same forward. Its backward is the same picture with the sides changed: K/V stay, and Q, dout, lse
// and delta go round, with dQ (and a bias and its gradient, where it is split by rows) instead of dKV. Bytes of one hop
// of n query rows, per batch entry, with e and a the element sizes of the input and of the accumulator:
//     Q backward    n q_heads  ((qk_dim + v_dim) e + (qk_dim + 2) a)
//     KV backward   n kv_heads ((qk_dim + v_dim) e + (qk_dim + v_dim) a)
// so with as many KV heads as query heads Q sends 0.67 (16 bit) or 0.75 (fp32) of it where both head dims are equal.
//
// Every rank has the same steps and transfers, also where a shard is empty or the mask leaves nothing to compute.
#include "ringspan/plan/schedules/ring.h"

#include <utility>

#include "ringspan/plan/schedules/schedules.h"

namespace ringspan::detail {
namespace {

class RingWriter {
 public:
  RingWriter(const RankPlan& part, const Ring& ring) : part_(part), ring_(ring) {}

  Step step(int64_t s) const {
    const int64_t team = wrap(ring_.index - s, ring_.size);
    Step step;
    step.step = ring_.first_step + s;
    const bool kv_visits = ring_.visitors == Ring::Side::kKv;
    (kv_visits ? step.q : step.kv) = ring_.staying;
    (kv_visits ? step.kv : step.q) = visitor(team, input_slot(s));
    step.tiles = ring_.tiles_with(team);
    if (s < ring_.size - 1) step.before = hop(s, ring_.inputs, input_slot(s), input_slot(s + 1), false);
    GradientPlace& stays = kv_visits ? step.dq : step.dkv;
    stays = {.slot = ring_.staying.slot, .begins = s == 0};
    GradientPlace& goes = kv_visits ? step.dkv : step.dq;
    const int64_t first_hop = from_owner() ? 0 : 1;
    goes = {.slot = gradient_slot(s), .begins = s <= first_hop};
    if (ring_.size > 1 && s >= first_hop && !ring_.gradients.empty()) {
      const bool comes_home = s == ring_.size - 1;
      step.after = hop(s, ring_.gradients, gradient_slot(s), comes_home ? ring_.own.slot : gradient_slot(s + 1),
                       comes_home && !from_owner());
    }
    return step;
  }

 private:
  bool from_owner() const { return part_.grad_route == GradRoute::kFromOwner; }

  int64_t input_slot(int64_t s) const { return ring_.own.slot + (s == 0 ? 0 : 2 - s % 2); }

  int64_t gradient_slot(int64_t s) const {
    if (ring_.size == 1) return ring_.own.slot;
    return from_owner() ? ring_.own.slot + 1 + s % 2 : input_slot(s);
  }

  Operand visitor(int64_t team, int64_t slot) const {
    Operand operand = ring_.own;
    operand.slot = slot;
    operand.rows = ring_.rows[team];
    if (operand.owner != kSeveral) operand.owner = ring_.rank_of(team);
    return operand;
  }

  // One hop as this rank lists it: its sends, then its receives.
  std::vector<Transfer> hop(int64_t s, const std::vector<Payload>& payloads, int64_t src_slot, int64_t dst_slot,
                            bool adds) const {
    std::vector<Transfer> transfers;
    transfers.reserve(2 * payloads.size());
    for (const int64_t src_team : {ring_.index, wrap(ring_.index - 1, ring_.size)}) {
      const int64_t team = wrap(src_team - s, ring_.size);
      const Operand from = visitor(team, src_slot);
      const Route route{.step = ring_.first_step + s,
                        .needed_by = ring_.first_step + s + 1,
                        .src = ring_.rank_of(src_team),
                        .dst = ring_.rank_of(wrap(src_team + 1, ring_.size)),
                        .owner = from.owner,
                        .from = from,
                        .to = visitor(team, dst_slot),
                        .adds = adds};
      for (const Payload payload : payloads) {
        transfers.push_back(transfer_of(part_, payload, route, {{0, ring_.rows[team]}}));
      }
    }
    return transfers;
  }

  const RankPlan& part_;
  const Ring& ring_;
};

// One rank a team, forward.
Ring plain_ring(const Plan& plan, const RankPlan& part) {
  return {.size = part.world,
          .index = part.rank,
          .rows = part.kv_rows,
          .own = own_kv(part),
          .staying = own_q(part),
          .inputs = kv_inputs(),
          .rank_of = [](int64_t team) { return team; },
          .tiles_with = [&plan, q = rows_of(plan.q_map(), part.rank)](
                            int64_t owner) { return tiles_between(plan, q, rows_of(plan.kv_map(), owner)); }};
}

}  // namespace

void append_ring(const RankPlan& part, const Ring& ring, std::vector<Step>& steps) {
  const RingWriter writer(part, ring);
  for (int64_t s = 0; s < ring.size; ++s) steps.push_back(writer.step(s));
}

void build_ring(const Plan& plan, RankPlan& part) {
  Ring ring = plain_ring(plan, part);
  append_ring(part, ring, part.forward);
  ring.gradients = kv_gradients();
  ring.tiles_with = [&part](int64_t owner) { return part.forward[wrap(part.rank - owner, part.world)].tiles; };
  append_ring(part, ring, part.backward);
}

void build_q_ring(const Plan& plan, RankPlan& part) {
  Ring ring = plain_ring(plan, part);
  append_ring(part, ring, part.forward);
  ring.visitors = Ring::Side::kQ;
  ring.rows = part.q_rows;
  std::swap(ring.own, ring.staying);
  ring.inputs = backward_q_inputs(part.problem);
  ring.gradients = q_gradients(part.problem);
  ring.tiles_with = [&plan, kv = rows_of(plan.kv_map(), part.rank)](int64_t owner) {
    return tiles_between(plan, rows_of(plan.q_map(), owner), kv);
  };
  append_ring(part, ring, part.backward);
}

}  // namespace ringspan::detail
