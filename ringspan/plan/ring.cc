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
//     rank 0   dKV0 [1] >>     dKV2 [2] >>     dKV1 [1] >>    then dKV0 in [2]
//     rank 1   dKV1 [1] >>     dKV0 [2] >>     dKV2 [1] >>    then dKV1 in [2]
//     rank 2   dKV2 [1] >>     dKV1 [2] >>     dKV0 [1] >>    then dKV2 in [2]
//     kFromNext, W - 1 hops: step 0 stays at home in [0], the others use [2 - s % 2]; the last hop's is added to [0].
//              step 0          step 1          step 2
//     rank 0   dKV0 [0]        dKV2 [1] >>     dKV1 [2] >>    then dKV0 in [1], added to [0]
//     rank 1   dKV1 [0]        dKV0 [1] >>     dKV2 [2] >>    then dKV1 in [1], added to [0]
//     rank 2   dKV2 [0]        dKV1 [1] >>     dKV0 [2] >>    then dKV2 in [1], added to [0]
//
// Messages a rank sends, K and V counted apart:   forward 2 (W - 1),
//     backward 2 (W - 1) + 2 W (kFromOwner) or 4 (W - 1) (kFromNext); none where W = 1.
// Bytes of one hop of equal shards of n rows:     batch * kv_heads * n * (qk_dim + v_dim) * element size,
//     gradients with the accumulator's element size. Shards of other lengths pass through every rank too, so over
//     all hops each rank sends what all but one of the shards hold (all of them for W gradient hops).
// Every rank has the same steps and transfers, also where a shard is empty or the mask leaves nothing to compute.
#include "ringspan/plan/ring.h"

#include <algorithm>

namespace ringspan::detail {
namespace {

int64_t wrap(int64_t rank, int64_t world) { return (rank % world + world) % world; }

// Where the K/V of step s lie.
int64_t kv_slot(int64_t step) { return step == 0 ? kOwnSlot : 2 - step % 2; }

// Where the gradients of step s gather; for s = world, where the last hop arrives.
int64_t grad_slot(int64_t step, GradRoute route) {
  if (route == GradRoute::kFromOwner) return 1 + step % 2;
  return step == 0 ? kOwnSlot : 2 - step % 2;
}

std::vector<Tile> tiles_of(const Plan& plan, int64_t rank, int64_t owner) {
  const ShardMap& q_map = plan.q_map();
  const ShardMap& kv_map = plan.kv_map();
  const int64_t num_lists = std::max({plan.mask().num_lists(), q_map.num_lists(), kv_map.num_lists()});
  std::vector<Tile> tiles;
  for (int64_t batch = 0; batch < num_lists; ++batch) {
    const std::vector<Tile> found =
        intersect(plan.mask(), batch, q_map.segments(rank, batch), kv_map.segments(owner, batch));
    tiles.insert(tiles.end(), found.begin(), found.end());
  }
  // One list for all entries: the others differ in nothing but the batch index.
  const size_t num_tiles = tiles.size();
  const int64_t copies = num_lists == 1 ? plan.problem().batch : 1;
  tiles.reserve(num_tiles * copies);
  for (int64_t batch = 1; batch < copies; ++batch) {
    for (size_t k = 0; k < num_tiles; ++k) {
      tiles.push_back(tiles[k]);
      tiles.back().batch = batch;
    }
  }
  return tiles;
}

// One hop around the ring as rank `rank` lists it: its sends of `owner`'s rows, then its receives of those of the
// owner that the rank before works on.
std::vector<Transfer> hop(const RankPlan& part, int64_t step, Payload first, Payload second, int64_t src_slot,
                          int64_t dst_slot) {
  std::vector<Transfer> transfers;
  for (int64_t src : {part.rank, wrap(part.rank - 1, part.world)}) {
    const int64_t owner = wrap(src - step, part.world);
    for (Payload payload : {first, second}) {
      transfers.push_back({.step = step,
                           .src = src,
                           .dst = wrap(src + 1, part.world),
                           .payload = payload,
                           .owner = owner,
                           .batch_begin = 0,
                           .batch_end = part.problem.batch,
                           .head_begin = 0,
                           .head_end = part.problem.kv_heads,
                           .rows = {{.begin = 0, .end = part.kv_rows[owner]}},
                           .src_slot = src_slot,
                           .dst_slot = dst_slot});
    }
  }
  return transfers;
}

}  // namespace

void build_ring(const Plan& plan, RankPlan& part) {
  const GradRoute route = part.grad_route;
  for (int64_t s = 0; s < part.world; ++s) {
    Step step;
    step.step = s;
    step.kv_owner = wrap(part.rank - s, part.world);
    step.kv_slot = kv_slot(s);
    step.tiles = tiles_of(plan, part.rank, step.kv_owner);
    if (s < part.world - 1) step.before = hop(part, s, Payload::kK, Payload::kV, kv_slot(s), kv_slot(s + 1));
    part.forward.push_back(step);

    const int64_t first_hop = route == GradRoute::kFromOwner ? 0 : 1;
    if (part.world > 1) {
      step.grad_slot = grad_slot(s, route);
      step.grad_begins = s <= first_hop;
      if (s >= first_hop) {
        step.after = hop(part, s, Payload::kDk, Payload::kDv, grad_slot(s, route), grad_slot(s + 1, route));
      }
    }
    part.backward.push_back(std::move(step));
  }
}

}  // namespace ringspan::detail
