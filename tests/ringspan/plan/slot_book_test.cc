// SlotBook: what is packed, what becomes a slot as it lies, what moves, and when memory is free. Bytes by hand.
#include "ringspan/plan/slot_book.h"

#include <set>
#include <string>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"
#include "ringspan/plan/walk.h"

#include "tests/ringspan/plan/plan_cases.h"

namespace ringspan {
namespace {

// One entry, one head and a dim of 1 for K and V: a row of K and V is 8 bytes in fp32.
Problem small_problem(int64_t length) {
  return {.q_heads = 1, .kv_heads = 1, .q_len = length, .kv_len = length, .qk_dim = 1, .v_dim = 1, .scale = 1};
}

// Notes what its owner is told to do, and that memory is used only while it is there.
class Witness : public SlotBook {
 public:
  using SlotBook::SlotBook;

  void compute(const Step& step) {
    for (const Payload payload : {Payload::kK, Payload::kV}) {
      if (step.kv.slot != kOwnSlot) {
        use(slot(payload, step.kv.slot, step.kv.rows, heads_of(payload, part_.problem, step.kv)));
      }
    }
  }
  std::string take() { return std::exchange(seen_, ""); }
  bool is_empty() const { return live_.empty(); }

 private:
  void on_make(Block block, int64_t bytes, Payload payload) override {
    live_.insert(block);
    seen_ += concat("make ", bytes, " for ", name_of(payload), ", ");
  }
  void on_free(Block block) override {
    EXPECT_EQ(live_.erase(block), 1u);
    seen_ += "free, ";
  }
  void on_start(const Journey& journey) override {
    live_.insert(journey.received.block);
    if (journey.sent.block != kNoBlock) use(journey.sent);
    for (const MessagePart& part : journey.packed) use(part.area);
    seen_ += concat(journey.packed.empty() ? "send " : "pack ", journey.sent.bytes, ", receive ",
                    journey.received.bytes, journey.is_gathered ? " by all, " : ", ");
  }
  void on_finish(const std::vector<const Journey*>& journeys) override {
    for (const Journey* journey : journeys) {
      if (journey->is_sent()) use(journey->received);
    }
  }
  void on_arrival(const MessagePart& part) override {
    if (part.area.block != kNoBlock) use(part.area);
    seen_ += concat(part.transfer->adds ? "add " : "move ", name_of(part.transfer->payload), ", ");
  }
  void use(const Area& area) { EXPECT_TRUE(live_.contains(area.block)) << "block " << area.block; }

  std::set<Block> live_;
  std::string seen_;
};

Plan plan_of(const Schedule& schedule, const ShardMap& map, Exchange exchange) {
  return build_plan(small_problem(map.seq_len()), MaskSpec::full(map.seq_len(), map.seq_len()), map, map, schedule,
                    route_of(exchange, map.world()));
}

TEST(SlotBook, ARingPacksItsOwnRowsOnceAndPassesMessagesOn) {
  const RankPlan part = plan_of(Schedule::kRing, ShardMap::contiguous(12, 3), Exchange::kP2p).rank(0);
  Witness book(part, part.forward, Exchange::kP2p);
  book.post(part.forward[0].before);
  EXPECT_EQ(book.take(), "make 32 for k, pack 32, receive 32, ");
  book.wait(1, false);
  EXPECT_EQ(book.take(), "free, ");  // what was packed
  book.post(part.forward[1].before);
  EXPECT_EQ(book.take(), "send 32, receive 32, ");
  book.wait(2, false);
  EXPECT_EQ(book.take(), "free, ");  // what was passed on
  book.wait(3, false);
  EXPECT_EQ(book.take(), "free, ");
  EXPECT_TRUE(book.is_empty());
  EXPECT_EQ(book.most_bytes(), 64);
}

TEST(SlotBook, RowsOfPartOfASlotMoveThere) {
  const RankPlan part = plan_of(Schedule::kGather, ShardMap::from_lengths({4, 1, 7}), Exchange::kP2p).rank(0);
  Witness book(part, part.forward, Exchange::kP2p);
  book.post(part.forward[0].before);
  EXPECT_EQ(book.take(), "make 64 for k, pack 64, receive 64, ");
  book.wait(1, false);
  EXPECT_EQ(book.take(), "free, make 32 for k, move k, make 32 for v, move v, move k, move v, free, ");
  book.wait(2, false);
  EXPECT_TRUE(book.is_empty());
  EXPECT_EQ(book.most_bytes(), 128);
}

TEST(SlotBook, AnAllGatherTakesItsOwnRowsOnceAndIsAsLongAsTheLongestShard) {
  const RankPlan part = plan_of(Schedule::kGather, ShardMap::from_lengths({4, 1, 7}), Exchange::kAllGather).rank(1);
  Witness book(part, part.forward, Exchange::kAllGather);
  book.post(part.forward[0].before);
  EXPECT_EQ(book.take(), "make 56 for k, pack 56, receive 168 by all, ");
  book.wait(1, false);
  // What came, and the rows of the other two side by side.
  EXPECT_EQ(book.most_bytes(), 168 + (4 + 7) * 8);
}

TEST(SlotBook, AllMemoryIsFreeInTheEnd) {
  for (const Exchange exchange : {Exchange::kAllToAll, Exchange::kP2p}) {
    for (const Schedule& schedule : schedules_for(4)) {
      for (const testing::NamedMap& named : testing::maps_of_sixteen()) {
        if (named.map.world() % std::max<int64_t>(1, schedule.inner) != 0) continue;
        SCOPED_TRACE(concat(name_of(schedule), " ", named.name, " ", name_of(exchange)));
        const Plan plan = build_plan(testing::problem_of(16, 16), testing::causal(16), named.map, named.map, schedule,
                                     route_of(exchange, named.map.world()));
        for (int64_t rank = 0; rank < plan.world(); ++rank) {
          const RankPlan part = plan.rank(rank);
          for (const std::vector<Step>* steps : {&part.forward, &part.backward}) {
            Witness book(part, *steps, exchange);
            walk(*steps, book);
            EXPECT_TRUE(book.is_empty()) << "rank " << rank;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringspan
