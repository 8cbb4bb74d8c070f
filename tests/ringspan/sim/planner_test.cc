#include "ringspan/sim/planner.h"

#include <algorithm>
#include <string>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"

#include "tests/ringspan/sim/sim_cases.h"

namespace ringspan {
namespace {

PlannerQuestion question_of(int64_t world, int64_t heads, const MaskSpec& mask) {
  const Problem problem{.q_heads = heads,
                        .kv_heads = heads,
                        .q_len = mask.q_len(),
                        .kv_len = mask.kv_len(),
                        .qk_dim = 8,
                        .v_dim = 8,
                        .scale = 1};
  return {.problem = problem, .mask = mask, .world = world};
}

const Candidate* find(const Choice& choice, const std::string& schedule, const std::string& shard, int64_t tp = 1) {
  for (const Candidate& candidate : choice.candidates) {
    if (name_of(candidate.schedule) == schedule && candidate.shard == shard && candidate.tensor_parallel == tp) {
      return &candidate;
    }
  }
  return nullptr;
}

TEST(Planner, FastestFirstAndAsSimulated) {
  const MaskSpec mask = MaskSpec::causal(512, 512, Corner::kTopLeft);
  const Machine machine = testing::round_machine();
  const Choice choice = choose_plan(question_of(4, 4, mask), machine);
  ASSERT_TRUE(choice.is_found());
  for (size_t k = 1; k < choice.candidates.size(); ++k) {
    EXPECT_LE(choice.candidates[k - 1].seconds(), choice.candidates[k].seconds());
  }
  const Candidate* ring = find(choice, "ring", "head_tail");
  ASSERT_NE(ring, nullptr);
  const PlannerQuestion question = question_of(4, 4, mask);
  const ShardMap map = ShardMap::head_tail(512, 4);
  const Plan plan = build_plan(question.problem, mask, map, map, Schedule::kRing, GradRoute::kFromOwner);
  EXPECT_DOUBLE_EQ(ring->seconds(), simulate(plan, machine).seconds());
  EXPECT_NE(choice.reason.find(name_of(choice.candidates[0].schedule)), std::string::npos);
  EXPECT_NE(choice.reason.find("slower"), std::string::npos);
}

// Slow links and a narrow window: what moves the fewest bytes wins.
TEST(Planner, AWindowIsPruned) {
  Machine machine = testing::round_machine();
  machine.node.bytes_per_second = 1e4;
  const Choice choice = choose_plan(question_of(8, 1, MaskSpec::window(4096, 4096, 16, 0, Corner::kTopLeft)), machine);
  EXPECT_EQ(name_of(choice.candidates[0].schedule), "pruned") << choice.reason;
  EXPECT_EQ(choice.candidates[0].shard, "contiguous");
}

TEST(Planner, RefusesWhatDoesNotFitInMemory) {
  PlannerQuestion question = question_of(4, 4, MaskSpec::causal(512, 512, Corner::kTopLeft));
  question.shards = {"head_tail"};
  Machine machine = testing::round_machine();
  const Choice all = choose_plan(question, machine);
  const int64_t ring = find(all, "ring", "head_tail")->memory_bytes,
                gather = find(all, "gather", "head_tail")->memory_bytes;
  ASSERT_LT(ring, gather);
  machine.memory_bytes = static_cast<double>(ring);
  const Choice some = choose_plan(question, machine);
  EXPECT_TRUE(some.is_found());
  EXPECT_NE(find(some, "gather", "head_tail")->refused.find("GiB"), std::string::npos);
  EXPECT_TRUE(find(some, "ring", "head_tail")->refused.empty());
  machine.memory_bytes = 1;
  const Choice none = choose_plan(question, machine);
  EXPECT_FALSE(none.is_found());
  EXPECT_NE(none.reason.find("nothing fits"), std::string::npos);
}

TEST(Planner, TensorParallelSplitsHeadsAndPaysForActivations) {
  PlannerQuestion question = question_of(8, 6, MaskSpec::full(512, 512));
  question.tensor_parallel = {1, 2, 3, 4, 8};
  question.shards = {"contiguous"};
  question.schedules = {Schedule::kRing};
  const Choice choice = choose_plan(question, testing::round_machine());
  const Candidate* two = find(choice, "ring", "contiguous", 2);
  ASSERT_NE(two, nullptr);
  // 2 of 8 ranks split heads, so 128 of 512 rows; half of their 48 numbers goes each way, twice a pass.
  EXPECT_NEAR(two->tensor_parallel_seconds, 2 * 2 * 0.5 * 128 * 48 * 4 / 1e6, 1e-12);
  for (const int64_t misfit : {3, 4, 8}) {
    const auto found = std::find_if(choice.candidates.begin(), choice.candidates.end(),
                                    [&](const Candidate& c) { return c.tensor_parallel == misfit; });
    EXPECT_NE(found->refused.find(misfit == 3 ? "world of 8" : "6 KV heads"), std::string::npos) << found->refused;
  }
}

TEST(Planner, NamesWhatItDoesNotKnow) {
  PlannerQuestion question = question_of(2, 1, MaskSpec::full(8, 8));
  question.shards = {"spiral"};
  const Choice choice = choose_plan(question, testing::round_machine());
  EXPECT_FALSE(choice.is_found());
  EXPECT_NE(choice.candidates[0].refused.find("spiral"), std::string::npos);
}

}  // namespace
}  // namespace ringspan
