#include "ringspan/sim/simulate.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ringspan/base/error.h"
#include "ringspan/ledger/ledger.h"
#include "ringspan/sim/sample.h"

#include "tests/ringspan/sim/sim_cases.h"

namespace ringspan {
namespace {

Problem problem_of(int64_t seq_len) {
  return {.q_heads = 1, .kv_heads = 1, .q_len = seq_len, .kv_len = seq_len, .qk_dim = 8, .v_dim = 8, .scale = 1};
}

Plan plan_of(const std::string& schedule, const MaskSpec& mask, const ShardMap& map, Exchange exchange,
             int64_t heads = 1) {
  Problem problem = problem_of(map.seq_len());
  problem.q_heads = problem.kv_heads = heads;
  return build_plan(problem, mask, map, map, parse_schedule(schedule), route_of(exchange, map.world()));
}

Simulation simulated(const Plan& plan, const Machine& machine, Exchange exchange = Exchange::kP2p) {
  return simulate(plan, machine, {.exchange = exchange});
}

// World 2, shards of 1000 rows, full mask: a tile is 1e6 pairs of 4 * 8 flops, 32 ms; K and V of a shard are 64000
// bytes, 64 ms at 1 MB/s.
constexpr int64_t kLength = 2000;
constexpr double kTile = 0.032, kHop = 0.064;

Plan two_ranks(Exchange exchange = Exchange::kP2p, const std::string& schedule = "ring") {
  return plan_of(schedule, MaskSpec::full(kLength, kLength), ShardMap::contiguous(kLength, 2), exchange);
}

TEST(Simulate, AHopThatIsLongerThanATileShows) {
  const Simulation simulation = simulated(two_ranks(), testing::round_machine());
  EXPECT_NEAR(simulation.forward.seconds, kHop + kTile, 1e-9);
  EXPECT_NEAR(simulation.forward.compute_seconds, 2 * kTile, 1e-9);
  EXPECT_NEAR(simulation.forward.exposed_seconds, kHop - kTile, 1e-9);
  EXPECT_NEAR(simulation.forward.idle_seconds, 0, 1e-9);
}

TEST(Simulate, AHopThatIsShorterThanATileIsHidden) {
  Machine machine = testing::round_machine();
  machine.node.bytes_per_second = 4e6;
  const Simulation simulation = simulated(two_ranks(), machine);
  EXPECT_NEAR(simulation.forward.seconds, 2 * kTile, 1e-9);
  EXPECT_NEAR(simulation.forward.exposed_seconds, 0, 1e-9);
  machine.overlap = 0.25;
  EXPECT_NEAR(simulated(two_ranks(), machine).forward.seconds, 2 * kTile + 0.75 * kHop / 4, 1e-9);
}

TEST(Simulate, FixedCostsAddUp) {
  Machine machine = testing::round_machine();
  machine.node = {.latency_seconds = 0.5, .bytes_per_second = 1e9};
  machine.step_seconds = 0.25;
  machine.forward_call_seconds = 3;
  machine.kernels[0].forward_row_seconds = 1e-4;
  // Rows of a tile: 1000 of queries and 1000 of keys. The hop is 64 us of bytes behind half a second.
  const double step = kTile + 0.25 + 0.2;
  EXPECT_NEAR(simulated(two_ranks(), machine).forward.seconds, 3 + std::max(step, 0.5 + 64e-6) + step, 1e-9);
  machine.copy_bytes_per_second = 64000;  // one second to pack what leaves the caller's tensors
  EXPECT_NEAR(simulated(two_ranks(), machine).forward.seconds, 3 + 1 + std::max(step, 0.5 + 64e-6) + step, 1e-9);
}

TEST(Simulate, RanksOfOtherNodesAreReachedOverTheNetwork) {
  Machine machine = testing::round_machine();
  machine.network.bytes_per_second = 0.5e6;
  EXPECT_NEAR(simulated(two_ranks(), machine).forward.seconds, kHop + kTile, 1e-9);
  machine.ranks_per_node = 1;
  EXPECT_NEAR(simulated(two_ranks(), machine).forward.seconds, 2 * kHop + kTile, 1e-9);
}

TEST(Simulate, RanksShareTheProcessorsOfANode) {
  Machine machine = testing::round_machine();
  machine.node.bytes_per_second = 1e30;
  const auto causal = [](int64_t world) {
    return plan_of("ring", MaskSpec::causal(kLength, kLength, Corner::kTopLeft), ShardMap::contiguous(kLength, world),
                   Exchange::kP2p);
  };
  const double all = static_cast<double>(kLength * (kLength + 1) / 2) * 32 / 1e9;
  // One processor: all work one after the other, however it is split.
  machine.processors_per_node = 1;
  for (const int64_t world : {1, 2, 4}) EXPECT_NEAR(simulated(causal(world), machine).forward.seconds, all, 1e-9);
  // Two ranks on two processors: the second has three quarters of the pairs.
  machine.processors_per_node = 2;
  const double busiest = (1e6 + 1000 * 1001 / 2) * 32 / 1e9;
  EXPECT_NEAR(simulated(causal(2), machine).forward.seconds, busiest, 1e-9);
  // Four ranks on two: both are busy at first, then the last rank goes on alone.
  const double seconds = simulated(causal(4), machine).forward.seconds;
  EXPECT_GT(seconds, all / 2);
  EXPECT_LT(seconds, all * 0.75);
}

// Documents of 100, 100 and 1800: rank 0 is soon done, and nobody needs anything of it.
TEST(Simulate, AnAllToAllMayWaitForEveryRank) {
  const int64_t lengths[] = {100, 100, 1800};
  const MaskSpec mask = documents_by_lengths(2000, {{lengths, lengths + 3}}, {});
  const ShardMap map = ShardMap::from_lengths({100, 100, 1800});
  Machine machine = testing::round_machine();
  machine.node.bytes_per_second = 1e12;
  const Plan plan = plan_of("pruned", mask, map, Exchange::kAllToAll);
  const double alone = 100 * 101 / 2 * 32 / 1e9, busiest = 1800.0 * 1801 / 2 * 32 / 1e9;
  const SimulatedPass apart = simulated(plan, machine, Exchange::kAllToAll).forward;
  EXPECT_NEAR(apart.ranks[0].end, alone, 1e-9);
  EXPECT_NEAR(apart.seconds, busiest, 1e-9);
  machine.all_to_all_waits_for_all = true;
  EXPECT_NEAR(simulated(plan, machine, Exchange::kAllToAll).forward.ranks[0].end, busiest, 1e-9);
}

// Backward of two ranks: 6 * 8 + 4 * 8 flops a pair at half the speed, 160 ms a tile; K, V and their gradients in fp32.
TEST(Simulate, GradientsGoHome) {
  Machine machine = testing::round_machine();
  const double tile = 0.16;
  // kFromNext: KV0 travels under tile 0; the gradient leaves after tile 1.
  EXPECT_NEAR(simulated(two_ranks(), machine).backward.seconds, 2 * tile + kHop, 1e-9);
  // kFromOwner: the gradient of tile 0 must come before tile 1 adds to it, and goes home after that.
  const Plan from_owner = two_ranks(Exchange::kAllToAll);
  EXPECT_NEAR(simulated(from_owner, machine, Exchange::kAllToAll).backward.seconds, 2 * tile + 2 * kHop, 1e-9);
}

TEST(Simulate, EveryScheduleComputesWhatTheLedgerCounts) {
  const Machine machine = testing::round_machine();
  const MaskSpec mask = MaskSpec::causal(96, 96, Corner::kTopLeft);
  for (const int64_t world : {1, 2, 4, 6}) {
    for (const Schedule& schedule : schedules_for(world)) {
      for (const Exchange exchange : {Exchange::kAllToAll, Exchange::kP2p}) {
        for (const bool waits : {false, true}) {
          SCOPED_TRACE(concat(name_of(schedule), " world ", world, " ", name_of(exchange), " waits ", waits));
          Machine it = machine;
          it.all_to_all_waits_for_all = waits;
          const Plan plan = plan_of(name_of(schedule), mask, ShardMap::head_tail(96, world), exchange, 3);
          const Simulation simulation = simulated(plan, it, exchange);
          double flops = 0;
          for (int64_t rank = 0; rank < world; ++rank) {
            const RankLedger ledger = ledger_of(plan.rank(rank), exchange);
            flops += static_cast<double>(ledger.forward.flops());
            const double seconds = static_cast<double>(ledger.backward.flops()) / 5e8;
            EXPECT_NEAR(simulation.backward.ranks[rank].compute_seconds, seconds, 1e-9);
            EXPECT_GE(simulation.backward.ranks[rank].end, seconds - 1e-9);
          }
          EXPECT_NEAR(simulation.forward.compute_seconds, flops / 1e9 / static_cast<double>(world), 1e-9);
        }
      }
    }
  }
}

TEST(Simulate, AllGatherIsOneExchange) {
  const Simulation simulation =
      simulated(two_ranks(Exchange::kAllGather, "gather"), testing::round_machine(), Exchange::kAllGather);
  EXPECT_NEAR(simulation.forward.seconds, kHop + kTile, 1e-9);
}

TEST(Simulate, MemoryIsThatOfTheFullestRank) {
  const Plan plan = plan_of("ring", MaskSpec::full(300, 300), ShardMap::from_lengths({100, 200}), Exchange::kP2p);
  Machine machine = testing::round_machine();
  const Simulation simulation = simulated(plan, machine);
  const RankLedger ledger = ledger_of(plan.rank(1), Exchange::kP2p);
  // q, k, v, out, dout of 8 numbers a row, and lse.
  EXPECT_EQ(simulation.memory_bytes, 200 * 4 * (5 * 8 + 1) + ledger.backward.peak_bytes);
  EXPECT_EQ(simulation.memory_rank, 1);
  EXPECT_TRUE(simulation.fits);
  machine.memory_bytes = static_cast<double>(simulation.memory_bytes) - 1;
  EXPECT_FALSE(simulated(plan, machine).fits);
}

TEST(Sample, TakesEvenlySpreadBlocks) {
  const detail::Sample sample(12, 2, 6);
  EXPECT_EQ(sample.ranks(), (std::vector<int64_t>{0, 1, 4, 5, 10, 11}));
  const int64_t stand_in[] = {0, 1, 0, 1, 4, 5, 4, 5, 10, 11, 10, 11};
  for (int64_t rank = 0; rank < 12; ++rank) EXPECT_EQ(sample.ranks()[sample.index_for(rank)], stand_in[rank]) << rank;
  EXPECT_FALSE(sample.is_whole());
  EXPECT_TRUE(detail::Sample(12, 2, 12).is_whole());
}

TEST(Simulate, AFewRanksStandForAll) {
  Machine machine = testing::round_machine();
  machine.ranks_per_node = 4;
  const int64_t length = 64 * 64;
  for (const char* schedule : {"ring", "hybrid:4", "double_ring:4", "pruned", "q_ring", "gather", "ulysses"}) {
    const Plan plan = plan_of(schedule, MaskSpec::causal(length, length, Corner::kTopLeft),
                              ShardMap::head_tail(length, 64), Exchange::kAllToAll, 4);
    const Simulation whole = simulate(plan, machine, {.most_ranks_built = 64});
    const Simulation part = simulate(plan, machine, {.most_ranks_built = 16});
    EXPECT_EQ(whole.ranks_built, 64);
    EXPECT_EQ(part.ranks_built, 16) << schedule;
    EXPECT_NEAR(part.forward.seconds / whole.forward.seconds, 1, 0.05) << schedule;
    EXPECT_NEAR(part.backward.seconds / whole.backward.seconds, 1, 0.05) << schedule;
  }
}

// More ranks than are built: every message still has its receiver, whatever the mask, the map and the exchange.
TEST(Simulate, NoRankWaitsForAStandIn) {
  const int64_t world = 24, length = world * 80;
  std::vector<int64_t> lengths, documents;
  for (int64_t rank = 0; rank < world; ++rank) lengths.push_back(40 + 80 * (rank % 2));
  for (int64_t n = 0; n < 12; ++n) documents.push_back(60 + 9 * n);
  const MaskSpec masks[] = {MaskSpec::full(length, length), MaskSpec::causal(length, length, Corner::kTopLeft),
                            MaskSpec::window(length, length, 100, 0, Corner::kTopLeft),
                            documents_by_lengths(length, {documents}, {})};
  const ShardMap maps[] = {ShardMap::head_tail(length, world), ShardMap::striped(length, world),
                           ShardMap::from_lengths(lengths), ShardMap::per_document(documents, world, length)};
  for (const char* name : {"ring", "hybrid:4", "double_ring:4", "pruned", "q_ring", "gather", "ulysses", "invariant"}) {
    for (size_t mask = 0; mask < std::size(masks); ++mask) {
      for (size_t map = 0; map < std::size(maps); ++map) {
        for (const Exchange exchange : {Exchange::kAllToAll, Exchange::kP2p}) {
          SCOPED_TRACE(::testing::Message() << name << ", mask " << mask << ", map " << map);
          const Plan plan = plan_of(name, masks[mask], maps[map], exchange, 4);
          const Simulation part = simulate(plan, testing::round_machine(), {.exchange = exchange});
          EXPECT_GT(part.forward.seconds, 0);
          EXPECT_EQ(part.ranks_built, std::string(name) == "invariant" ? world : 16);
        }
      }
    }
  }
}

TEST(Simulate, RefusesToPlayMoreStepsThanItCanHold) {
  const int64_t length = int64_t{1} << 22;
  const Plan plan = plan_of("invariant", MaskSpec::causal(length, length, Corner::kTopLeft),
                            ShardMap::head_tail(length, 1024), Exchange::kAllToAll);
  try {
    simulate(plan, testing::round_machine());
    FAIL() << "played 16 million steps";
  } catch (const Unsupported& refusal) {
    EXPECT_NE(std::string(refusal.what()).find("1024 ranks"), std::string::npos) << refusal.what();
    EXPECT_NE(std::string(refusal.what()).find("at most 1200000"), std::string::npos) << refusal.what();
  }
}

TEST(Trace, HasASpanForEveryComputationAndWait) {
  const Plan plan = plan_of("ring", MaskSpec::full(kLength, kLength), ShardMap::contiguous(kLength, 4), Exchange::kP2p);
  const Simulation simulation =
      simulate(plan, testing::round_machine(), {.exchange = Exchange::kP2p, .steps_of = {0, 3}});
  const auto trace = nlohmann::json::parse(chrome_trace(simulation));
  double computing = 0, exposed = 0;
  std::vector<int64_t> threads;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "M" || event["pid"] != 1) continue;
    EXPECT_GT(event["dur"], 0);
    threads.push_back(event["tid"]);
    if (event["tid"] == 3) (event["cat"] == "compute" ? computing : exposed) += event["dur"].get<double>();
  }
  std::sort(threads.begin(), threads.end());
  threads.erase(std::unique(threads.begin(), threads.end()), threads.end());
  EXPECT_EQ(threads, (std::vector<int64_t>{0, 3}));
  const detail::RankTimes& rank = simulation.backward.ranks[3];
  EXPECT_NEAR(computing, rank.compute_seconds * 1e6, 1e-3);
  EXPECT_NEAR(exposed, (rank.wait_seconds + rank.copy_seconds) * 1e6, 1e-3);
  EXPECT_THROW(chrome_trace(simulate(plan, testing::round_machine(), {.exchange = Exchange::kP2p})), Error);
  EXPECT_THROW(simulate(plan, testing::round_machine(), {.exchange = Exchange::kP2p, .steps_of = {4}}), Error);
}

}  // namespace
}  // namespace ringspan
