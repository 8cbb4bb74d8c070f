// How long one rank's part of a plan takes to build, without the way through Python and back.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "ringspan/plan/plan.h"

using namespace ringspan;

// Median seconds of `repeats`, from document lengths (all `document`; 0: one causal sequence) to the steps of a rank in
// the middle: masks of packed sequences change with every batch. `tokens` a rank, split head-tail; the ring.
extern "C" double ringspan_plan_seconds(int64_t world, int64_t tokens, int64_t document, int64_t heads,
                                        int64_t head_dim, int64_t repeats) {
  using Clock = std::chrono::steady_clock;
  const int64_t length = world * tokens;
  const Problem problem{.q_heads = heads,
                        .kv_heads = heads,
                        .q_len = length,
                        .kv_len = length,
                        .qk_dim = head_dim,
                        .v_dim = head_dim,
                        .scale = default_scale(head_dim)};
  std::vector<double> seconds;
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    const Clock::time_point begin = Clock::now();
    const MaskSpec mask = document == 0
                              ? MaskSpec::causal(length, length, Corner::kTopLeft)
                              : documents_by_lengths(length, {std::vector<int64_t>(length / document, document)}, {});
    const RankPlan part =
        build_plan(problem, mask, ShardMap::head_tail(length, world), Schedule::kRing).rank(world / 2);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    if (part.forward.empty()) return 0;  // it is used, so it is built
  }
  std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
  return seconds[repeats / 2];
}
