// A verification sees what differs, and each term enters it.
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cli/verify_run.h"

namespace ringspan::cli {
namespace {

constexpr int64_t kLength = 23;

Problem problem_of(const Terms& terms) {
  const Problem problem{.batch = 2,
                        .q_heads = 4,
                        .kv_heads = 2,
                        .q_len = kLength,
                        .kv_len = kLength,
                        .qk_dim = 8,
                        .v_dim = 6,
                        .scale = default_scale(8)};
  return with_terms(problem, terms);
}

MaskSpec mask_of() { return MaskSpec::causal(kLength, kLength, Corner::kTopLeft); }

Verifier verifier_of(const Terms& terms) { return Verifier(problem_of(terms), mask_of(), terms, 5); }

Plan plan_of(const Problem& problem, const MaskSpec& mask, const Schedule& schedule) {
  return build_plan(problem, mask, ShardMap::head_tail(kLength, 4), schedule);
}

std::vector<std::string> not_met(const Verification& result) {
  std::vector<std::string> names;
  for (const Comparison& c : result.comparisons) {
    if (!c.met()) names.push_back(c.quantity);
  }
  return names;
}

struct NamedTerms {
  const char* name;
  Terms terms;
};

std::vector<NamedTerms> every_term() {
  return {{"bias by rows", {.bias = Terms::Bias::kRows}},
          {"shared bias", {.bias = Terms::Bias::kShared}},
          {"mask", {.mask = true}},
          {"slopes", {.slopes = true}},
          {"sink", {.sink = true}},
          {"gradient of lse", {.lse_gradient = true}},
          {"softcap", {.softcap = 1.5}},
          {"dropout", {.dropout = 0.4}},
          {"all",
           {.bias = Terms::Bias::kRows,
            .mask = true,
            .slopes = true,
            .sink = true,
            .lse_gradient = true,
            .softcap = 1.5,
            .dropout = 0.4}}};
}

TEST(Verify, EveryTermHoldsUnderEverySchedule) {
  for (const auto& [name, terms] : every_term()) {
    const Verifier verifier = verifier_of(terms);
    for (const Schedule& schedule : schedules_for(4)) {
      const Verification result = verifier.run(plan_of(problem_of(terms), mask_of(), schedule), 1);
      EXPECT_TRUE(result.met()) << name << " " << name_of(schedule) << ": "
                                << ::testing::PrintToString(not_met(result));
    }
  }
}

// Else both sides could leave it out. dq shows each of them; inputs come in the same order with and without.
TEST(Verify, EveryTermChangesTheReference) {
  const Verifier plain = verifier_of({});
  const auto bytes_of_dq = [](const Verifier& verifier) {
    const TensorView view = verifier.want().dq.view();
    return std::string(reinterpret_cast<const char*>(view.data),
                       static_cast<size_t>(view.num_elements() * size_of(view.dtype)));
  };
  EXPECT_EQ(bytes_of_dq(plain), bytes_of_dq(verifier_of({})));
  for (const auto& [name, terms] : every_term()) EXPECT_NE(bytes_of_dq(plain), bytes_of_dq(verifier_of(terms))) << name;
}

TEST(Verify, AskedGradientsAreCompared) {
  const Terms terms{.bias = Terms::Bias::kShared, .sink = true};
  const Verification result = verifier_of(terms).run(plan_of(problem_of(terms), mask_of(), Schedule::kRing), 1);
  std::vector<std::string> names;
  for (const Comparison& c : result.comparisons) names.push_back(c.quantity);
  EXPECT_EQ(names, (std::vector<std::string>{"out", "lse", "dq", "dk", "dv", "dbias", "dsink"}));
}

// A plan of another mask stands for a schedule that computes the wrong pairs.
TEST(Verify, AWrongPairIsSeenInEveryQuantityAndInThePlan) {
  const MaskSpec other = MaskSpec::window(kLength, kLength, kLength - 2, 0, Corner::kTopLeft);
  const Verification result = verifier_of({}).run(plan_of(problem_of({}), other, Schedule::kRing), 1);
  EXPECT_FALSE(result.met());
  EXPECT_EQ(not_met(result), (std::vector<std::string>{"out", "lse", "dq", "dk", "dv"}));
  EXPECT_FALSE(result.plan_faults.empty());
}

TEST(Verify, AWrongFactorIsSeen) {
  Problem other = problem_of({});
  other.scale *= 1 + 1e-3;
  const Verification result = verifier_of({}).run(plan_of(other, mask_of(), Schedule::kGather), 1);
  EXPECT_FALSE(result.met());
  EXPECT_TRUE(result.plan_faults.empty());
  EXPECT_FALSE(not_met(result).empty());
}

}  // namespace
}  // namespace ringspan::cli
