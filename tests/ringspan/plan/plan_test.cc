#include "ringspan/plan/plan.h"

#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"

#include "tests/ringspan/plan/plan_cases.h"

namespace ringspan {
namespace {

using testing::causal;
using testing::problem_of;

std::string fault_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& fault) {
    return fault.what();
  }
  return "";
}

TEST(Plan, PaddingRowsAreNamed) {
  const ShardMap map =
      ShardMap::from_segments(6,
                              {{{{.local_row = 1, .begin = 0, .length = 2}, {.local_row = 5, .begin = 2, .length = 1}},
                                {{.local_row = 0, .begin = 3, .length = 3}}}},
                              {8, 3});
  const Plan plan = build_plan(problem_of(6, 6), causal(6), map, Schedule::kRing);
  EXPECT_EQ(plan.rank(0).q_padding, (std::vector<std::vector<RowRange>>{{{0, 1}, {3, 5}, {6, 8}}}));
  EXPECT_EQ(plan.rank(1).q_padding, (std::vector<std::vector<RowRange>>{{}}));
  EXPECT_EQ(rank_plan_from_json(to_json(plan.rank(0))), plan.rank(0));
}

// Each refusal names what is wrong with both values.
TEST(Plan, RefusesWhatDoesNotFit) {
  const ShardMap two = ShardMap::contiguous(8, 2);
  const auto fault = [](const Problem& problem, const MaskSpec& mask, const ShardMap& q_map, const ShardMap& kv_map) {
    return fault_of([&] { build_plan(problem, mask, q_map, kv_map, Schedule::kRing); });
  };
  EXPECT_EQ(fault(problem_of(8, 8), causal(8), two, two), "");
  struct Case {
    std::string fault;
    std::vector<std::string> says;
  };
  const ShardMap holed = ShardMap::from_segments(8, {{{{.begin = 0, .length = 3}}, {{.begin = 4, .length = 4}}}});
  const ShardMap per_batch =
      ShardMap::from_segments(8, {{{{.begin = 0, .length = 8}}, {}}, {{}, {{.begin = 0, .length = 8}}}});
  const Case cases[] = {
      {fault(problem_of(9, 8), causal(8), two, two), {"mask", "8", "q_len is 9"}},
      {fault(problem_of(8, 9), causal(8), two, two), {"mask", "8", "kv_len is 9"}},
      {fault(problem_of(8, 8), causal(8), ShardMap::contiguous(7, 2), two), {"query shard map", "7", "q_len is 8"}},
      {fault(problem_of(8, 8), causal(8), two, ShardMap::contiguous(9, 2)), {"K/V shard map", "9", "kv_len is 8"}},
      {fault(problem_of(8, 8), causal(8), two, ShardMap::contiguous(8, 3)), {"2 ranks", "3;"}},
      {fault(problem_of(8, 8, 3), MaskSpec(8, 8, {{}, {}}), two, two), {"mask has 2", "problem 3"}},
      {fault(problem_of(8, 8, 3), causal(8), per_batch, two), {"query shard map has 2", "problem 3"}},
      {fault(problem_of(8, 8, 3), causal(8), two, per_batch), {"K/V shard map has 2", "problem 3"}},
      {fault(problem_of(8, 8), causal(8), two, holed), {"no rank holds K/V position 3", "0..7"}},
  };
  for (const Case& c : cases) {
    ASSERT_NE(c.fault, "");
    for (const std::string& part : c.says) EXPECT_NE(c.fault.find(part), std::string::npos) << c.fault;
  }
  Problem bad = problem_of(8, 8);
  bad.v_dim = 0;
  EXPECT_NE(fault(bad, causal(8), two, two).find("v_dim"), std::string::npos);
  const Plan plan = build_plan(problem_of(8, 8), causal(8), two, Schedule::kRing);
  EXPECT_THROW(plan.rank(2), Error);
  EXPECT_THROW(plan.rank(-1), Error);
  EXPECT_THROW(parse_schedule("spiral"), Error);
}

TEST(Plan, JsonRoundTrip) {
  for (const auto& [name, map] : testing::maps_of_sixteen()) {
    for (GradRoute route : {GradRoute::kFromOwner, GradRoute::kFromNext}) {
      Problem problem = problem_of(16, 16, 2);
      problem.scale = 1.0 / 3.0;
      problem.layout = Layout::kSBH;
      problem.dtype = DType::kF64;
      const Plan plan = build_plan(problem, documents_by_lengths(16, {{3, 5, 2, 6}, {2, 0, 7}}, {}), map, map,
                                   Schedule::kRing, route);
      for (const Schedule& schedule : schedules_for(plan.world())) {
        const Plan other = build_plan(problem, plan.mask(), map, map, schedule, route);
        for (int64_t rank = 0; rank < plan.world(); ++rank) {
          const RankPlan part = other.rank(rank);
          EXPECT_EQ(rank_plan_from_json(to_json(part)), part) << name << ' ' << name_of(schedule);
        }
      }
    }
  }
}

TEST(Plan, JsonOfAllRanksHoldsEachPart) {
  const Plan plan = build_plan(problem_of(8, 8), causal(8), ShardMap::contiguous(8, 2), Schedule::kRing);
  const std::string text = plan.to_json();
  for (int64_t rank = 0; rank < 2; ++rank) EXPECT_NE(text.find(to_json(plan.rank(rank))), std::string::npos);
  EXPECT_EQ(text.find("{\"problem\":{\"batch\":1,\"q_heads\":4,\"kv_heads\":2,"), 0u);
}

TEST(Plan, JsonThatIsNoPartIsRefused) {
  const std::string good =
      to_json(build_plan(problem_of(8, 8), causal(8), ShardMap::contiguous(8, 2), Schedule::kRing).rank(0));
  EXPECT_THROW(rank_plan_from_json(""), Error);
  EXPECT_THROW(rank_plan_from_json("{}"), Error);
  EXPECT_THROW(rank_plan_from_json("[1, 2]"), Error);
  EXPECT_THROW(rank_plan_from_json(good.substr(0, good.size() / 2)), Error);
  for (const auto& [from, to] : {std::pair("\"ring\"", "\"spiral\""), std::pair("\"bf16\"", "\"int8\""),
                                 std::pair("\"rank\":0", "\"rank\":\"0\""), std::pair("\"from_next\"", "\"north\"")}) {
    std::string spoiled = good;
    spoiled.replace(spoiled.find(from), std::string(from).size(), to);
    EXPECT_THROW(rank_plan_from_json(spoiled), Error) << from;
  }
}

TEST(Plan, PrintsOneLinePerStep) {
  const Plan plan = build_plan(problem_of(8, 8), causal(8), ShardMap::contiguous(8, 2), Schedule::kRing);
  EXPECT_EQ(plan.rank(1).str(),
            "rank 1 of 2, ring, 4 query rows, 4 K/V rows\n"
            "  forward\n"
            "    step 0  q of 1[0]  kv of 1[0]  tiles    1  pairs         10"
            "  | before: k+v of 1 [0] -> rank 0 [1], 640 bytes\n"
            "    step 1  q of 1[0]  kv of 0[1]  tiles    1  pairs         16\n"
            "  backward\n"
            "    step 0  q of 1[0]  kv of 1[0]  dq begins [0]  dkv begins [0]  tiles    1  pairs         10"
            "  | before: k+v of 1 [0] -> rank 0 [1], 640 bytes\n"
            "    step 1  q of 1[0]  kv of 0[1]  dq adds   [0]  dkv begins [1]  tiles    1  pairs         16"
            "  | after: dk+dv of 0 [1] -> rank 0 [0], 1280 bytes\n"
            "  sends 640 bytes forward, 1920 backward\n");
  const std::string text = plan.str();
  EXPECT_EQ(text.find("ring over 2 ranks: batch 1, heads 4/2, q_len 8"), 0u);
  EXPECT_NE(text.find(plan.rank(0).str()), std::string::npos);
}

TEST(Transfer, BytesFollowPayloadAndDtype) {
  const Problem problem = problem_of(16, 16, 2);  // bf16, dims 24 and 16
  Transfer transfer{.batch_end = 2, .head_begin = 1, .head_end = 3, .rows = {{0, 2}, {5, 8}}};
  EXPECT_EQ(transfer.num_rows(), 5);
  const auto bytes = [&](Payload payload) {
    transfer.payload = payload;
    return bytes_of(transfer, problem);
  };
  EXPECT_EQ(bytes(Payload::kK), 5 * 2 * 2 * 24 * 2);
  EXPECT_EQ(bytes(Payload::kV), 5 * 2 * 2 * 16 * 2);
  EXPECT_EQ(bytes(Payload::kDk), 5 * 2 * 2 * 24 * 4);
  EXPECT_EQ(bytes(Payload::kDv), 5 * 2 * 2 * 16 * 4);
  EXPECT_EQ(bytes(Payload::kQ), bytes(Payload::kK));
  EXPECT_EQ(bytes(Payload::kOut), bytes(Payload::kV));
  EXPECT_EQ(bytes(Payload::kLse), 5 * 2 * 2 * 4);
  EXPECT_EQ(bytes(Payload::kDq), bytes(Payload::kDk));
}

TEST(Transfer, PayloadNamesRoundTrip) {
  for (const char* name :
       {"q", "k", "v", "out", "max", "sum", "lse", "dout", "delta", "bias", "mask", "dq", "dk", "dv", "dbias"}) {
    EXPECT_STREQ(name_of(parse_payload(name)), name);
  }
  EXPECT_THROW(parse_payload("qkv"), Error);
}

}  // namespace
}  // namespace ringspan
