#include "ringspan/ledger/ledger.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ringspan/base/error.h"

#include "tests/ringspan/support/ring_run.h"

namespace ringspan {
namespace {

constexpr int64_t kSeqLen = 19;

Problem small_problem(DType dtype = DType::kF32) {
  return {.batch = 2,
          .q_heads = 4,
          .kv_heads = 2,
          .q_len = kSeqLen,
          .kv_len = kSeqLen,
          .qk_dim = 8,
          .v_dim = 5,
          .dtype = dtype,
          .scale = 0.4};
}

ShardMap map_named(const std::string& name, int64_t world) {
  if (name == "contiguous") return ShardMap::contiguous(kSeqLen, world);
  if (name == "head_tail") return ShardMap::head_tail(kSeqLen, world);
  if (name == "striped") return ShardMap::striped(kSeqLen, world);
  // Everything on the last rank: the others are empty.
  std::vector<int64_t> lengths(world, 0);
  lengths.back() = kSeqLen;
  return ShardMap::from_lengths(lengths);
}

MaskSpec causal() { return MaskSpec::causal(kSeqLen, kSeqLen, Corner::kTopLeft); }

Plan plan_for(const Problem& problem, const ShardMap& map, std::optional<Exchange> exchange) {
  const Schedule schedule = exchange == Exchange::kAllGather ? Schedule::kGather : Schedule::kRing;
  return build_plan(problem, causal(), map, map, schedule,
                    exchange ? route_of(*exchange, map.world()) : GradRoute::kFromNext);
}

int64_t rows_of(const ShardMap& map, int64_t rank) { return map.local_rows(rank); }

class LedgerTest : public ::testing::TestWithParam<std::tuple<std::string, int64_t, DType>> {
 protected:
  const std::string& map_name() const { return std::get<0>(GetParam()); }
  int64_t world() const { return std::get<1>(GetParam()); }
  Problem problem() const { return small_problem(std::get<2>(GetParam())); }
};

// Counted by the transport while the plan runs.
TEST_P(LedgerTest, EqualsWhatTheTransportCounts) {
  const Plan plan = plan_for(problem(), map_named(map_name(), world()), std::nullopt);
  const test::RingResults results = test::run_ring(plan, test::random_inputs(1, problem()));
  for (int64_t rank = 0; rank < world(); ++rank) {
    const RankLedger ledger = ledger_of(plan.rank(rank), std::nullopt);
    EXPECT_EQ(ledger.forward.sent_bytes(), results.forward[rank].bytes_sent) << "rank " << rank;
    EXPECT_EQ(ledger.forward.messages(), results.forward[rank].messages_sent) << "rank " << rank;
    EXPECT_EQ(ledger.forward.sent_bytes() + ledger.backward.sent_bytes(), results.total[rank].bytes_sent);
    EXPECT_EQ(ledger.forward.messages() + ledger.backward.messages(), results.total[rank].messages_sent);
  }
}

// Written out anew from the grids of plan/ring.cc: what passes through a rank on its way round.
TEST_P(LedgerTest, EqualsTheFormulaOfEachExchange) {
  const ShardMap map = map_named(map_name(), world());
  const Problem p = problem();
  const int64_t element = p.dtype == DType::kF32 ? 4 : 2;
  const int64_t k_row = p.batch * p.kv_heads * p.qk_dim, v_row = p.batch * p.kv_heads * p.v_dim;
  int64_t longest = 0;
  for (int64_t rank = 0; rank < world(); ++rank) longest = std::max(longest, rows_of(map, rank));
  for (const Exchange exchange : {Exchange::kAllToAll, Exchange::kP2p, Exchange::kAllGather}) {
    const Plan plan = plan_for(p, map, exchange);
    for (int64_t rank = 0; rank < world(); ++rank) {
      // Ring: K/V of all ranks but the next one pass through; gradients of all (collective) or of all but the own
      // (p2p). Gather: all shards as long as the longest; gradients of all but the own.
      const int64_t ring_rows = kSeqLen - rows_of(map, (rank + 1) % world());
      const int64_t kv_rows = exchange == Exchange::kAllGather ? (world() - 1) * longest : world() == 1 ? 0 : ring_rows;
      const int64_t grad_rows = world() == 1 ? 0 : kSeqLen - (exchange == Exchange::kAllToAll ? 0 : rows_of(map, rank));
      const RankLedger ledger = ledger_of(plan.rank(rank), exchange);
      std::map<Payload, int64_t> forward, backward;
      for (const StepLedger& step : ledger.forward.steps) {
        for (const SentTensor& tensor : step.sent) forward[tensor.payload] += tensor.bytes;
      }
      for (const StepLedger& step : ledger.backward.steps) {
        for (const SentTensor& tensor : step.sent) backward[tensor.payload] += tensor.bytes;
      }
      SCOPED_TRACE(::testing::Message() << name_of(exchange) << " rank " << rank);
      EXPECT_EQ(forward[Payload::kK], kv_rows * k_row * element);
      EXPECT_EQ(forward[Payload::kV], kv_rows * v_row * element);
      EXPECT_EQ(backward[Payload::kK], kv_rows * k_row * element);
      EXPECT_EQ(backward[Payload::kV], kv_rows * v_row * element);
      EXPECT_EQ(backward[Payload::kDk], grad_rows * k_row * 4);
      EXPECT_EQ(backward[Payload::kDv], grad_rows * v_row * 4);
    }
  }
}

TEST_P(LedgerTest, CountsEveryPairOnce) {
  const Plan plan = plan_for(problem(), map_named(map_name(), world()), Exchange::kAllToAll);
  int64_t forward = 0, flops = 0, backward = 0, backward_flops = 0;
  for (int64_t rank = 0; rank < world(); ++rank) {
    const RankLedger ledger = ledger_of(plan.rank(rank), Exchange::kAllToAll);
    forward += ledger.forward.kept_pairs();
    flops += ledger.forward.flops();
    backward += ledger.backward.kept_pairs();
    backward_flops += ledger.backward.flops();
  }
  const int64_t pairs = 2 * kSeqLen * (kSeqLen + 1) / 2;
  EXPECT_EQ(forward, pairs);
  EXPECT_EQ(backward, pairs);
  EXPECT_EQ(flops, pairs * 4 * (2 * 8 + 2 * 5));
  EXPECT_EQ(backward_flops, pairs * 4 * (6 * 8 + 4 * 5));
}

INSTANTIATE_TEST_SUITE_P(Maps, LedgerTest,
                         ::testing::Combine(::testing::Values("contiguous", "head_tail", "striped", "one_rank"),
                                            ::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(DType::kF32, DType::kBF16)),
                         [](const auto& param) {
                           return std::get<0>(param.param) + "_" + std::to_string(std::get<1>(param.param)) + "_" +
                                  name_of(std::get<2>(param.param));
                         });

TEST(LedgerMessagesTest, OneHopIsOneMessage) {
  const auto messages = [](const ShardMap& map, Exchange exchange, int64_t rank) {
    const RankLedger ledger = ledger_of(plan_for(small_problem(), map, exchange).rank(rank), exchange);
    return std::pair(ledger.forward.messages(), ledger.backward.messages());
  };
  const ShardMap even = ShardMap::contiguous(kSeqLen, 4);
  EXPECT_EQ(messages(even, Exchange::kAllToAll, 0), std::pair(int64_t{3}, int64_t{7}));
  EXPECT_EQ(messages(even, Exchange::kP2p, 0), std::pair(int64_t{3}, int64_t{6}));
  EXPECT_EQ(messages(even, Exchange::kAllGather, 0), std::pair(int64_t{1}, int64_t{2}));
  // Rank 1 holds all: rank 0 has nothing to pass on but what comes back to it. A collective is posted all the same.
  const ShardMap lone = ShardMap::from_lengths({0, kSeqLen});
  EXPECT_EQ(messages(lone, Exchange::kP2p, 0), std::pair(int64_t{0}, int64_t{1}));
  EXPECT_EQ(messages(lone, Exchange::kAllToAll, 0), std::pair(int64_t{1}, int64_t{3}));
}

TEST(LedgerCaseTest, SimplestCaseIsTheTextbookFormula) {
  // S = 1024, K and V of 4096 values a token in 16 bits, 4 ranks: 3 rounds of 2 * 256 * 4096 * 2 bytes.
  const Problem problem{.q_heads = 32,
                        .kv_heads = 32,
                        .q_len = 1024,
                        .kv_len = 1024,
                        .qk_dim = 128,
                        .v_dim = 128,
                        .dtype = DType::kBF16,
                        .scale = 1};
  const ShardMap map = ShardMap::contiguous(1024, 4);
  const Plan plan = build_plan(problem, MaskSpec::full(1024, 1024), map, map, Schedule::kRing, GradRoute::kFromOwner);
  const PassLedger forward = ledger_of(plan.rank(2), Exchange::kAllToAll).forward;
  EXPECT_EQ(forward.messages(), 3);
  EXPECT_EQ(forward.sent_bytes(), 3 * 2 * 256 * 4096 * 2);
  for (const StepLedger& step : forward.steps) {
    EXPECT_EQ(step.sent_bytes(), step.step < 3 ? 2 * 256 * 4096 * 2 : 0) << "step " << step.step;
  }
}

TEST(LedgerCaseTest, PeakDoesNotGrowWithRanksInARing) {
  const auto peak = [](int64_t world, Exchange exchange) {
    const Problem problem{
        .q_heads = 4, .kv_heads = 2, .q_len = 64 * world, .kv_len = 64 * world, .qk_dim = 16, .v_dim = 16, .scale = 1};
    const ShardMap map = ShardMap::contiguous(64 * world, world);
    const Schedule schedule = exchange == Exchange::kAllGather ? Schedule::kGather : Schedule::kRing;
    const Plan plan =
        build_plan(problem, MaskSpec::full(64 * world, 64 * world), map, map, schedule, route_of(exchange, world));
    const RankLedger ledger = ledger_of(plan.rank(0), exchange);
    return std::pair(ledger.forward.peak_bytes, ledger.backward.peak_bytes);
  };
  EXPECT_EQ(peak(4, Exchange::kAllToAll), peak(8, Exchange::kAllToAll));
  EXPECT_EQ(peak(4, Exchange::kP2p), peak(8, Exchange::kP2p));
  const int64_t kv = 2 * 2 * 64 * 16 * 4;
  // All shards as they came, and those of the other ranks side by side.
  EXPECT_EQ(peak(8, Exchange::kAllGather).first - peak(4, Exchange::kAllGather).first, 2 * 4 * kv);
  // out, three statistics, and K/V twice: one being read, one arriving.
  EXPECT_EQ(peak(4, Exchange::kP2p).first, 4 * 64 * 16 * 4 + 3 * 4 * 64 * 4 + 2 * kv);
}

TEST(LedgerCaseTest, JsonHoldsEveryNumber) {
  const Plan plan = plan_for(small_problem(), ShardMap::head_tail(kSeqLen, 3), Exchange::kAllToAll);
  const RankLedger ledger = ledger_of(plan.rank(1), Exchange::kAllToAll);
  const auto json = nlohmann::json::parse(to_json(ledger));
  EXPECT_EQ(json["rank"], 1);
  for (const auto& [name, pass] : {std::pair("forward", &ledger.forward), std::pair("backward", &ledger.backward)}) {
    EXPECT_EQ(json[name]["sent_bytes"], pass->sent_bytes());
    EXPECT_EQ(json[name]["messages"], pass->messages());
    EXPECT_EQ(json[name]["kept_pairs"], pass->kept_pairs());
    EXPECT_EQ(json[name]["flops"], pass->flops());
    EXPECT_EQ(json[name]["peak_bytes"], pass->peak_bytes);
    ASSERT_EQ(json[name]["steps"].size(), pass->steps.size());
    for (size_t s = 0; s < pass->steps.size(); ++s) {
      EXPECT_EQ(json[name]["steps"][s]["kept_pairs"], pass->steps[s].kept_pairs);
      for (const SentTensor& tensor : pass->steps[s].sent) {
        EXPECT_EQ(json[name]["steps"][s]["sent"][name_of(tensor.payload)], tensor.bytes);
      }
    }
  }
}

TEST(LedgerCaseTest, RefusesAPlanOfAnotherRoute) {
  const Plan plan = plan_for(small_problem(), ShardMap::contiguous(kSeqLen, 2), Exchange::kP2p);
  EXPECT_THROW(ledger_of(plan.rank(0), Exchange::kAllToAll), Error);
  EXPECT_NO_THROW(ledger_of(plan.rank(0), Exchange::kP2p));
}

TEST(ExchangeTest, AllGatherCarriesScheduleGatherAlone) {
  for (const Schedule& schedule : schedules_for(4)) {
    EXPECT_TRUE(carries(Exchange::kAllToAll, schedule));
    EXPECT_TRUE(carries(Exchange::kP2p, schedule));
    EXPECT_EQ(carries(Exchange::kAllGather, schedule), schedule == Schedule::kGather) << name_of(schedule);
  }
  EXPECT_NO_THROW(check_exchange(Exchange::kAllGather, Schedule::kGather));
  try {
    check_exchange(Exchange::kAllGather, Schedule::kRing);
    FAIL() << "ring by all_gather was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(R"(use schedule="gather", exchange="all_gather")"), std::string::npos);
  }
  const Plan ring = plan_for(small_problem(), ShardMap::contiguous(kSeqLen, 2), Exchange::kAllToAll);
  EXPECT_THROW(ledger_of(ring.rank(0), Exchange::kAllGather), Error);
}

TEST(ExchangeTest, HelpNamesEach) {
  for (const char* name : {"auto", "all_to_all", "p2p", "all_gather"}) {
    EXPECT_NE(exchange_help().find(name), std::string::npos);
  }
}

TEST(ExchangeTest, NamesAndRoutes) {
  for (const Exchange exchange : {Exchange::kAllToAll, Exchange::kP2p, Exchange::kAllGather}) {
    EXPECT_EQ(parse_exchange(name_of(exchange)), exchange);
    EXPECT_EQ(route_of(exchange, 1), GradRoute::kFromNext);
  }
  EXPECT_EQ(parse_exchange("auto"), Exchange::kAllToAll);
  EXPECT_THROW(parse_exchange("ring"), Error);
}

}  // namespace
}  // namespace ringspan
