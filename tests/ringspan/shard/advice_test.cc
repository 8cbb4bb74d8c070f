// Which split would save over a sixth of the busiest rank's work: against pairs counted one by one.
#include "ringspan/shard/advice.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace ringspan {
namespace {

MaskSpec documents(const std::vector<int64_t>& lengths) {
  return documents_by_lengths(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}), {lengths},
                              {.kind = DocumentRule::Kind::kCausal});
}

std::optional<MapAdvice> ask(const MaskSpec& mask, int64_t world) {
  return better_map(mask, ShardMap::contiguous(mask.q_len(), world));
}

// Kept pairs of the busiest rank, every pair asked for on its own.
int64_t busiest_of(const MaskSpec& mask, const ShardMap& map) {
  int64_t most = 0;
  for (int64_t rank = 0; rank < map.world(); ++rank) {
    int64_t pairs = 0;
    for (int64_t batch = 0; batch < mask.num_lists(); ++batch) {
      for (const int64_t i : map.positions(rank)) {
        for (int64_t j = 0; j < mask.kv_len(); ++j) pairs += mask.keeps(batch, i, j);
      }
    }
    most = std::max(most, pairs);
  }
  return most;
}

bool saves(int64_t now, int64_t then) { return then * 6 < now * 5; }

// Rows of the first half keep `first` keys each, those of the second `second`; the first `more` rows of the first and
// of the second quarter keep one more.
MaskSpec halves(int64_t length, int64_t first, int64_t second, int64_t more) {
  const Band upper{.q_begin = 0, .q_end = length / 2, .kv_begin = 0, .kv_end = first};
  const Band lower{.q_begin = length / 2, .q_end = length, .kv_begin = 0, .kv_end = second};
  const Band extra{.q_begin = 0, .q_end = more, .kv_begin = first, .kv_end = first + 1};
  Band other = extra;
  other.q_begin += length / 4;
  other.q_end += length / 4;
  return MaskSpec(length, length, {{upper, lower, extra, other}});
}

TEST(BetterMap, HeadTailForACausalMask) {
  const std::optional<MapAdvice> advice = ask(MaskSpec::causal(256, 256, Corner::kTopLeft), 4);
  ASSERT_TRUE(advice);
  EXPECT_EQ(advice->map, "head_tail");
  EXPECT_EQ(advice->busiest, 256 * 257 / 2 - 192 * 193 / 2);
  EXPECT_EQ(advice->busiest_then, 256 * 257 / 2 / 4);
}

TEST(BetterMap, BalancedOnlyWhereHeadTailIsNotEnough) {
  // All work is in the first of four chunks: head_tail leaves it on one rank.
  const MaskSpec mask(256, 256, {{Band{.q_begin = 0, .q_end = 64, .kv_begin = 0, .kv_end = 256}}});
  const std::optional<MapAdvice> advice = ask(mask, 2);
  ASSERT_TRUE(advice);
  EXPECT_EQ(advice->map, "balanced");
  EXPECT_EQ(advice->busiest, 64 * 256);
  EXPECT_EQ(advice->busiest_then, 32 * 256);
}

TEST(BetterMap, NothingWhereWorkIsShared) {
  EXPECT_FALSE(ask(MaskSpec::full(256, 256), 4));
  EXPECT_FALSE(ask(MaskSpec::window(512, 512, 15, 0, Corner::kTopLeft), 4));
  EXPECT_FALSE(ask(documents({64, 64, 64, 64}), 4));
  EXPECT_FALSE(ask(MaskSpec(256, 256, {{}}), 4));
}

TEST(BetterMap, NothingForLessThan64RowsARank) {
  EXPECT_TRUE(ask(MaskSpec::causal(128, 128, Corner::kTopLeft), 2));
  EXPECT_FALSE(ask(MaskSpec::causal(127, 127, Corner::kTopLeft), 2));
  EXPECT_FALSE(ask(MaskSpec::causal(0, 0, Corner::kTopLeft), 2));
  EXPECT_FALSE(ask(MaskSpec::causal(128, 128, Corner::kTopLeft), 1));
}

TEST(BetterMap, NothingForWhatIsNoSelfAttentionInContiguousShards) {
  EXPECT_FALSE(ask(MaskSpec::causal(256, 300, Corner::kTopLeft), 2));
  const MaskSpec mask = MaskSpec::causal(256, 256, Corner::kTopLeft);
  EXPECT_FALSE(better_map(mask, ShardMap::striped(256, 2)));
  EXPECT_FALSE(better_map(mask, ShardMap::from_lengths({100, 156})));
  EXPECT_FALSE(better_map(mask, ShardMap::contiguous(512, 2)));
}

TEST(BetterMap, ExactlyASixthIsNotEnough) {
  // 6 and 4 keys a row: 384 pairs on rank 0, 320 where they are shared out.
  EXPECT_FALSE(ask(halves(128, 6, 4, 0), 2));
  // 386 and 321: a sixth of 386 is 64.3.
  const std::optional<MapAdvice> advice = ask(halves(128, 6, 4, 1), 2);
  ASSERT_TRUE(advice);
  EXPECT_EQ(advice->map, "head_tail");
  EXPECT_EQ(advice->busiest, 386);
  EXPECT_EQ(advice->busiest_then, 321);
}

TEST(BetterMap, AllBatchEntriesTogether) {
  // One entry loads the first rank, the other the last: together nothing is to be saved, alone all is.
  const Band head{.q_begin = 0, .q_end = 64, .kv_begin = 0, .kv_end = 128};
  const Band tail{.q_begin = 64, .q_end = 128, .kv_begin = 0, .kv_end = 128};
  EXPECT_TRUE(ask(MaskSpec(128, 128, {{head}}), 2));
  EXPECT_FALSE(ask(MaskSpec(128, 128, {{head}, {tail}}), 2));
  const std::optional<MapAdvice> advice = ask(MaskSpec(128, 128, {{head}, {head}}), 2);
  ASSERT_TRUE(advice);
  EXPECT_EQ(advice->busiest, 2 * 64 * 128);
  EXPECT_EQ(advice->busiest_then, 64 * 128);
}

TEST(BetterMap, CountsWhatIsCountedPairByPair) {
  std::mt19937_64 generator(11);
  const auto draw = [&](int64_t bound) { return static_cast<int64_t>(generator() % bound); };
  int64_t num_balanced = 0, num_head_tail = 0, num_none = 0;
  for (int round = 0; round < 60; ++round) {
    const int64_t world = 1 + draw(4), length = world * 64 + draw(40);
    std::vector<std::vector<Band>> lists(1 + draw(2));
    for (std::vector<Band>& bands : lists) {
      for (int64_t k = draw(5); k >= 0; --k) {
        const int64_t q_begin = draw(length), kv_begin = draw(length), lo = draw(2 * length) - length;
        bands.push_back({.q_begin = q_begin,
                         .q_end = q_begin + 1 + draw(length - q_begin),
                         .kv_begin = kv_begin,
                         .kv_end = kv_begin + 1 + draw(length - kv_begin),
                         .lo = lo,
                         .hi = lo + draw(length)});
      }
    }
    const MaskSpec mask(length, length, lists);
    const int64_t now = busiest_of(mask, ShardMap::contiguous(length, world));
    const int64_t head_tail = busiest_of(mask, ShardMap::head_tail(length, world));
    const int64_t balanced = busiest_of(mask, ShardMap::balanced(mask, world));
    const std::optional<MapAdvice> advice = ask(mask, world);
    ASSERT_EQ(advice.has_value(), saves(now, head_tail) || saves(now, balanced)) << "round " << round;
    if (!advice) {
      ++num_none;
      continue;
    }
    EXPECT_EQ(advice->busiest, now);
    EXPECT_TRUE(saves(now, advice->busiest_then));
    if (saves(now, head_tail)) {
      EXPECT_EQ(advice->map, "head_tail");
      EXPECT_EQ(advice->busiest_then, head_tail);
      ++num_head_tail;
    } else {
      EXPECT_EQ(advice->map, "balanced");
      EXPECT_GE(advice->busiest_then, balanced);
      ++num_balanced;
    }
  }
  EXPECT_GE(num_balanced, 5);
  EXPECT_GE(num_head_tail, 5);
  EXPECT_GE(num_none, 5);
}

TEST(BetterMap, BalancedIsNotAskedForMoreThanAMillionRows) {
  const auto work_in_front = [](int64_t length) {
    return MaskSpec(length, length, {{Band{.q_begin = 0, .q_end = length / 8, .kv_begin = 0, .kv_end = 16}}});
  };
  EXPECT_TRUE(ask(work_in_front(int64_t{1} << 16), 4));
  EXPECT_FALSE(ask(work_in_front(int64_t{1} << 20), 4));
  EXPECT_TRUE(ask(MaskSpec::causal(int64_t{1} << 24, int64_t{1} << 24, Corner::kTopLeft), 4));
}

}  // namespace
}  // namespace ringspan
