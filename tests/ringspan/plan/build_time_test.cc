// Plan::rank is built in time of what it lists. Two numbers of ranks are compared with each other, so that the speed of
// the machine does not matter: a loop over all ranks for every transfer costs eight times as much for each in the
// larger one.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "ringspan/plan/plan.h"

#include "tests/ringspan/plan/plan_cases.h"

namespace ringspan {
namespace {

using Clock = std::chrono::steady_clock;

int64_t num_listed(const RankPlan& part) {
  int64_t count = 0;
  for (const auto* steps : {&part.forward, &part.backward}) {
    for (const Step& step : *steps) count += std::ssize(step.tiles) + std::ssize(step.before) + std::ssize(step.after);
  }
  return count;
}

// The best of several, which other work on the machine disturbs least.
double seconds_per_item(const std::string& schedule, int64_t world) {
  const int64_t length = 16 * world;
  Problem problem = testing::problem_of(length, length);
  problem.q_heads = problem.kv_heads = 2048;  // some for every rank
  // Narrow, so that those who see all rows list few tiles.
  const MaskSpec mask = MaskSpec::window(length, length, 3, 0, Corner::kTopLeft);
  const Plan plan = build_plan(problem, mask, ShardMap::head_tail(length, world), parse_schedule(schedule));
  double best = 1e9;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const Clock::time_point begin = Clock::now();
    const RankPlan part = plan.rank(world / 2);
    const std::chrono::duration<double> took = Clock::now() - begin;
    best = std::min(best, took.count() / static_cast<double>(num_listed(part)));
  }
  return best;
}

class BuildTime : public ::testing::TestWithParam<const char*> {};

TEST_P(BuildTime, AnItemCostsTheSameForAnyNumberOfRanks) {
  EXPECT_LT(seconds_per_item(GetParam(), 1024), 4 * seconds_per_item(GetParam(), 128));
}

INSTANTIATE_TEST_SUITE_P(, BuildTime,
                         ::testing::Values("ring", "gather", "ulysses", "hybrid:8", "pruned", "q_ring",
                                           "double_ring:8"));

}  // namespace
}  // namespace ringspan
