// The ring plan against an enumeration of all pairs and a run of its messages with labels instead of tensors.
#include <algorithm>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "tests/ringspan/mask/pair_grid.h"
#include "tests/ringspan/plan/plan_cases.h"

namespace ringspan {
namespace {

using testing::causal;
using testing::PairGrid;
using testing::problem_of;

enum class Direction { kForward, kBackward };

const std::vector<Step>& steps_of(const RankPlan& part, Direction direction) {
  return direction == Direction::kForward ? part.forward : part.backward;
}

// How often all ranks together compute each pair of one batch entry.
PairGrid computed(const Plan& plan, Direction direction, int64_t batch) {
  PairGrid grid(plan.problem().q_len, plan.problem().kv_len);
  for (int64_t rank = 0; rank < plan.world(); ++rank) {
    const RankPlan part = plan.rank(rank);
    const std::vector<int64_t> q = plan.q_map().positions(rank, batch);
    for (const Step& step : steps_of(part, direction)) {
      const std::vector<int64_t> kv = plan.kv_map().positions(step.kv.owner, batch);
      for (const Tile& tile : step.tiles) {
        if (tile.batch != batch) continue;
        for (int64_t a = 0; a < tile.q_rows; ++a) {
          for (int64_t c = 0; c < tile.kv_rows; ++c) {
            const int64_t i = q.at(tile.q_row0 + a), j = kv.at(tile.kv_row0 + c);
            if (tile.lo <= j - i && j - i <= tile.hi) grid.add(i, j);
          }
        }
      }
    }
  }
  return grid;
}

void expect_computes(const Plan& plan) {
  for (int64_t batch = 0; batch < plan.problem().batch; ++batch) {
    const PairGrid expected = PairGrid::of(plan.problem().q_len, plan.problem().kv_len, [&](int64_t i, int64_t j) {
      return plan.q_map().place_of(i, batch).has_value() && plan.mask().keeps(batch, i, j);
    });
    EXPECT_EQ(computed(plan, Direction::kForward, batch), expected);
    EXPECT_EQ(computed(plan, Direction::kBackward, batch), expected);
  }
}

// What lies in each slot of each rank: for K/V whose it is, for gradients who has added to it.
struct Machine {
  std::map<std::pair<int64_t, Payload>, std::map<int64_t, std::multiset<int64_t>>> slots;

  void move(const std::vector<Transfer>& transfers, const std::vector<Transfer>& kept_by_peer) {
    std::vector<std::multiset<int64_t>> in_flight;
    for (const Transfer& t : transfers) {
      EXPECT_EQ(std::count(kept_by_peer.begin(), kept_by_peer.end(), t), 1);
      in_flight.push_back(slots[{t.src, t.payload}].at(t.from.slot));
      slots[{t.src, t.payload}].erase(t.from.slot);
    }
    for (size_t k = 0; k < transfers.size(); ++k) {
      auto& targets = slots[{transfers[k].dst, transfers[k].payload}];
      EXPECT_EQ(targets.contains(transfers[k].to.slot), transfers[k].adds);
      targets[transfers[k].to.slot].insert(in_flight[k].begin(), in_flight[k].end());
    }
  }
};

// Sends of all ranks in one step, and everything that their receivers list.
void collect(const std::vector<RankPlan>& parts, Direction direction, int64_t s, bool before,
             std::vector<Transfer>& sends, std::vector<Transfer>& receives) {
  for (const RankPlan& part : parts) {
    const Step& step = steps_of(part, direction).at(s);
    for (const Transfer& t : before ? step.before : step.after) {
      EXPECT_TRUE(t.src == part.rank || t.dst == part.rank);
      (t.src == part.rank ? sends : receives).push_back(t);
    }
  }
}

void run_messages(const Plan& plan, Direction direction) {
  std::vector<RankPlan> parts;
  Machine machine;
  for (int64_t rank = 0; rank < plan.world(); ++rank) {
    parts.push_back(plan.rank(rank));
    for (Payload payload : {Payload::kK, Payload::kV}) machine.slots[{rank, payload}][kOwnSlot] = {rank};
  }
  for (int64_t s = 0; s < plan.world(); ++s) {
    for (const RankPlan& part : parts) {
      const Step& step = steps_of(part, direction).at(s);
      EXPECT_EQ(step.kv.owner, (part.rank - s + plan.world()) % plan.world());
      for (Payload payload : {Payload::kK, Payload::kV}) {
        EXPECT_EQ((machine.slots[{part.rank, payload}].at(step.kv.slot)), std::multiset<int64_t>{step.kv.owner});
      }
      if (direction == Direction::kForward) continue;
      for (Payload payload : {Payload::kDk, Payload::kDv}) {
        auto& slots = machine.slots[{part.rank, payload}];
        EXPECT_EQ(step.dkv.begins, !slots.contains(step.dkv.slot));
        slots[step.dkv.slot].insert(part.rank);
        EXPECT_LE(slots.size(), plan.grad_route() == GradRoute::kFromOwner ? 2u : 3u);
      }
    }
    for (bool before : {true, false}) {
      std::vector<Transfer> sends, receives;
      collect(parts, direction, s, before, sends, receives);
      EXPECT_EQ(sends.size(), receives.size());
      machine.move(sends, receives);
    }
  }
  if (direction == Direction::kForward) return;
  std::multiset<int64_t> everyone;
  for (int64_t rank = 0; rank < plan.world(); ++rank) everyone.insert(rank);
  for (int64_t rank = 0; rank < plan.world(); ++rank) {
    for (Payload payload : {Payload::kDk, Payload::kDv}) {
      EXPECT_EQ((machine.slots[{rank, payload}].at(kOwnSlot)), everyone);
    }
  }
}

TEST(RingPlan, ComputesTheMaskForEveryLengthWorldAndMap) {
  for (int64_t length = 0; length <= 17; ++length) {
    for (int64_t world = 1; world <= 4; ++world) {
      for (const ShardMap& map : {ShardMap::contiguous(length, world), ShardMap::head_tail(length, world),
                                  ShardMap::striped(length, world)}) {
        for (const MaskSpec& mask :
             {MaskSpec::full(length, length), causal(length), MaskSpec::window(length, length, 3, 1, Corner::kTopLeft),
              MaskSpec::chunked(length, length, 4, Corner::kTopLeft)}) {
          expect_computes(build_plan(problem_of(length, length), mask, map, Schedule::kRing));
        }
        ASSERT_FALSE(HasFailure()) << length << " on " << world << "\n" << map.str();
      }
    }
  }
}

TEST(RingPlan, ComputesTheMaskOnUnevenEmptyAndPaddedShards) {
  const MaskSpec documents = documents_by_lengths(16, {{3, 5, 2, 6}, {2, 0, 7}}, {});
  for (const auto& [name, map] : testing::maps_of_sixteen()) {
    for (const MaskSpec& mask : {causal(16), documents, documents & MaskSpec::window(16, 16, 2, 0, Corner::kTopLeft)}) {
      expect_computes(build_plan(problem_of(16, 16, 2), mask, map, Schedule::kRing));
    }
    ASSERT_FALSE(HasFailure()) << name;
  }
}

TEST(RingPlan, CrossAttentionWithItsOwnMaps) {
  for (int64_t world : {1, 2, 3}) {
    for (const ShardMap& q_map : {ShardMap::striped(7, world), ShardMap::head_tail(7, world)}) {
      for (const ShardMap& kv_map : {ShardMap::contiguous(12, world), ShardMap::striped(12, world)}) {
        for (Corner corner : {Corner::kTopLeft, Corner::kBottomRight}) {
          const MaskSpec mask = MaskSpec::causal(7, 12, corner);
          expect_computes(build_plan(problem_of(7, 12), mask, q_map, kv_map, Schedule::kRing, GradRoute::kFromOwner));
        }
      }
    }
  }
}

// Queries 4..7 of 8 tokens on two ranks: the query map covers a part of the sequence, K/V all of it.
TEST(RingPlan, QueriesMayBeAPartOfTheSequence) {
  const ShardMap q_map = ShardMap::from_segments(8, {{{{.begin = 4, .length = 2}}, {{.begin = 6, .length = 2}}}});
  const Plan plan =
      build_plan(problem_of(8, 8), causal(8), q_map, ShardMap::contiguous(8, 2), Schedule::kRing, GradRoute::kFromNext);
  expect_computes(plan);
  EXPECT_EQ(computed(plan, Direction::kForward, 0).total(), 5 + 6 + 7 + 8);
}

TEST(RingPlan, ListsPerBatchEntryInMaskAndMap) {
  const ShardMap map = ShardMap::from_segments(6, {{{{.begin = 0, .length = 2}}, {{.begin = 2, .length = 4}}},
                                                   {{{.begin = 3, .length = 3}}, {{.begin = 0, .length = 3}}}});
  expect_computes(build_plan(problem_of(6, 6, 2), causal(6), map, Schedule::kRing));
  expect_computes(build_plan(problem_of(6, 6, 2), documents_by_lengths(6, {{2, 4}, {6}}, {}), map, Schedule::kRing));
  expect_computes(build_plan(problem_of(6, 6, 3), MaskSpec::prefix(6, 6, {0, 2, 5}, Corner::kTopLeft),
                             ShardMap::striped(6, 2), Schedule::kRing));
}

TEST(RingPlan, MessagesMeetAndGradientsComeHome) {
  for (int64_t world = 1; world <= 6; ++world) {
    for (GradRoute route : {GradRoute::kFromOwner, GradRoute::kFromNext}) {
      const ShardMap map = ShardMap::head_tail(9, world);
      const Plan plan = build_plan(problem_of(9, 9), causal(9), map, map, Schedule::kRing, route);
      run_messages(plan, Direction::kForward);
      run_messages(plan, Direction::kBackward);
      ASSERT_FALSE(HasFailure()) << world;
    }
  }
}

// Two valid tokens in 8 slots, head-tail on 2 ranks: rank 1 holds padding and still takes part in every exchange.
TEST(RingPlan, ARankWithoutTokensTakesPart) {
  std::vector<std::vector<Segment>> ranks(2);
  ranks[0] = {{.begin = 0, .length = 2}};
  const ShardMap map = ShardMap::from_segments(2, {ranks}, {4, 4});
  const Plan plan = build_plan(problem_of(2, 2), causal(2), map, Schedule::kRing);
  expect_computes(plan);
  for (int64_t rank : {0, 1}) {
    const RankPlan part = plan.rank(rank);
    EXPECT_EQ(part.q_rows, (std::vector<int64_t>{4, 4}));
    EXPECT_EQ(part.forward[0].before.size(), 4u);
    EXPECT_EQ(part.backward[1].after.size(), 4u);
  }
  const Plan empty = build_plan(problem_of(0, 0), causal(0), ShardMap::contiguous(0, 3), Schedule::kRing);
  EXPECT_EQ(empty.rank(2).forward[1].before.size(), 4u);
  EXPECT_EQ(sent_bytes(empty.rank(2)).forward, 0);
}

// Messages and bytes as the head of ring.cc states them.
TEST(RingPlan, SendsWhatItsDocumentationSays) {
  const Problem problem = problem_of(24, 24, 2);
  for (int64_t world = 1; world <= 5; ++world) {
    for (GradRoute route : {GradRoute::kFromOwner, GradRoute::kFromNext}) {
      const ShardMap map = ShardMap::contiguous(24, world);
      const Plan plan = build_plan(problem, causal(24), map, map, Schedule::kRing, route);
      for (int64_t rank = 0; rank < world; ++rank) {
        const RankPlan part = plan.rank(rank);
        int64_t forward = 0, backward = 0;
        for (const Step& step : part.forward) {
          for (const Transfer& t : step.before) forward += t.src == rank;
        }
        for (const Step& step : part.backward) {
          for (const Transfer& t : step.before) backward += t.src == rank;
          for (const Transfer& t : step.after) backward += t.src == rank;
        }
        const int64_t hops = world == 1 ? 0 : route == GradRoute::kFromOwner ? world : world - 1;
        EXPECT_EQ(forward, 2 * (world - 1));
        EXPECT_EQ(backward, 2 * (world - 1) + 2 * hops);
      }
    }
  }
  // 12 rows, batch 2, 2 KV heads, dims 24 + 16, bf16 and fp32.
  const ShardMap map = ShardMap::contiguous(24, 2);
  const int64_t elements = 12 * 2 * 2 * (24 + 16);
  const SentBytes next = sent_bytes(build_plan(problem, causal(24), map, Schedule::kRing).rank(1));
  EXPECT_EQ(next.forward, elements * 2);
  EXPECT_EQ(next.backward, elements * 2 + elements * 4);
  const SentBytes from_owner =
      sent_bytes(build_plan(problem, causal(24), map, map, Schedule::kRing, GradRoute::kFromOwner).rank(1));
  EXPECT_EQ(from_owner.backward, elements * 2 + 2 * elements * 4);
}

}  // namespace
}  // namespace ringspan
