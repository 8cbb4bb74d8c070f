// Maps that share out work: the worked grids of balance.cc, and random documents and bands.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"
#include "ringspan/shard/shard_map.h"

#include "tests/ringspan/shard/holders.h"

namespace ringspan {
namespace {

using testing::holders;

MaskSpec causal(int64_t length) { return MaskSpec::causal(length, length, Corner::kTopLeft); }

MaskSpec documents(const std::vector<int64_t>& lengths) {
  return documents_by_lengths(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}), {lengths},
                              {.kind = DocumentRule::Kind::kCausal});
}

// Kept pairs of every row, counted one by one.
std::vector<int64_t> rows_of(const MaskSpec& mask) {
  std::vector<int64_t> rows(mask.q_len(), 0);
  for (const Band& band : mask.bands(0)) {
    for (int64_t i = band.q_begin; i < band.q_end; ++i) {
      for (int64_t j = band.kv_begin; j < band.kv_end; ++j) rows[i] += band.lo <= j - i && j - i <= band.hi;
    }
  }
  return rows;
}

double imbalance_by_counting(const ShardMap& map, const MaskSpec& mask) {
  const std::vector<int64_t> rows = rows_of(mask);
  double most = 0, total = 0;
  for (int64_t rank = 0; rank < map.world(); ++rank) {
    double work = 0;
    for (const int64_t position : map.positions(rank)) work += static_cast<double>(rows[position]);
    most = std::max(most, work);
    total += work;
  }
  return total == 0 ? 1 : most / (total / static_cast<double>(map.world()));
}

TEST(PerDocument, WorkedGrid) {
  EXPECT_EQ(holders(ShardMap::per_document({8, 4}, 2)), "001111000110");
  EXPECT_EQ(ShardMap::per_document({8, 4}, 2).work(documents({8, 4})), (std::vector<int64_t>{23, 23}));
  // 5 tokens: 10 and 5 pairs; the heavier pair of the second document goes to the rank with 5.
  EXPECT_EQ(holders(ShardMap::per_document({5, 5}, 2)), "0110010011");
  EXPECT_EQ(ShardMap::per_document({5, 5}, 2).work(documents({5, 5})), (std::vector<int64_t>{15, 15}));
}

TEST(PerDocument, HoldsEachPositionOnceForAnyLengths) {
  for (const std::vector<int64_t>& lengths :
       {std::vector<int64_t>{}, {0}, {1}, {1, 1, 1, 1, 1}, {0, 5, 0, 3}, {17, 1, 2, 64, 3}, {100}}) {
    for (int64_t world = 1; world <= 7; ++world) {
      const ShardMap map = ShardMap::per_document(lengths, world);
      EXPECT_EQ(map.seq_len(), std::accumulate(lengths.begin(), lengths.end(), int64_t{0}));
      EXPECT_EQ(map.world(), world);
      EXPECT_TRUE(map.covers_all());
      EXPECT_EQ(holders(map).find_first_of(".!"), std::string::npos);
    }
  }
}

TEST(PerDocument, PaddingAfterTheDocumentsIsSharedOut) {
  EXPECT_EQ(holders(ShardMap::per_document({8}, 2, 12)), "001111000011");
  EXPECT_TRUE(ShardMap::per_document({3, 2}, 4, 17).covers_all());
  EXPECT_THROW(ShardMap::per_document({3, 2}, 4, 4), Error);
}

TEST(PerDocument, BalancesPairsOfOddDocuments) {
  std::mt19937_64 generator(7);
  for (int round = 0; round < 60; ++round) {
    const int64_t world = 2 + round % 7;
    std::vector<int64_t> lengths;
    int64_t total = 0;
    while (total < 64 * world) {
      lengths.push_back(1 + static_cast<int64_t>(generator() % 61));
      total += lengths.back();
    }
    const ShardMap map = ShardMap::per_document(lengths, world);
    const MaskSpec mask = documents(lengths);
    EXPECT_NEAR(map.imbalance(mask), imbalance_by_counting(map, mask), 1e-12);
    EXPECT_LE(map.imbalance(mask), 1.02) << "round " << round << ", " << world << " ranks";
  }
}

TEST(Balanced, WorkedGrid) {
  EXPECT_EQ(holders(ShardMap::balanced(causal(16), 2)), "0000111111110000");
  EXPECT_EQ(ShardMap::balanced(causal(16), 2).work(causal(16)), (std::vector<int64_t>{68, 68}));
}

TEST(Balanced, AnyBandMaskOfFineRows) {
  std::mt19937_64 generator(11);
  const auto draw = [&](int64_t below) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(below)); };
  int tried = 0;
  for (int round = 0; round < 120; ++round) {
    const int64_t world = 2 + round % 7, length = 64 * world + draw(200);
    std::vector<Band> bands;
    for (int64_t count = 1 + draw(8); count > 0; --count) {
      const int64_t a = draw(length), b = draw(length), c = draw(length), d = draw(length);
      bands.push_back(
          {std::min(a, b), std::max(a, b) + 1, std::min(c, d), std::max(c, d) + 1, -draw(length), draw(length)});
    }
    const MaskSpec mask(length, length, {bands});
    const ShardMap map = ShardMap::balanced(mask, world);
    EXPECT_EQ(holders(map).find_first_of(".!"), std::string::npos);
    EXPECT_NEAR(map.imbalance(mask), imbalance_by_counting(map, mask), 1e-12);
    const std::vector<int64_t> rows = rows_of(mask);
    const double total = static_cast<double>(std::accumulate(rows.begin(), rows.end(), int64_t{0}));
    const double heaviest = static_cast<double>(*std::max_element(rows.begin(), rows.end()));
    // Where some dozens of rows make up a rank's share there is room for two percent.
    if (heaviest * static_cast<double>(world) * 40 > total) continue;
    ++tried;
    EXPECT_LE(map.imbalance(mask), 1.02) << "round " << round << ", " << world << " ranks of " << length;
  }
  EXPECT_GT(tried, 40);
}

TEST(Balanced, CommonMasksWithFewSegments) {
  const int64_t length = 4096;
  const MaskSpec masks[] = {
      causal(length), MaskSpec::full(length, length), MaskSpec::window(length, length, 512, 0, Corner::kTopLeft),
      MaskSpec::prefix(length, length, {1000}, Corner::kTopLeft), documents({1000, 17, 2000, 1079})};
  for (const MaskSpec& mask : masks) {
    for (const int64_t world : {2, 3, 4, 8}) {
      const ShardMap map = ShardMap::balanced(mask, world);
      EXPECT_LE(map.imbalance(mask), 1.02);
      for (int64_t rank = 0; rank < world; ++rank) EXPECT_LE(map.segments(rank).size(), 16u);
    }
  }
}

TEST(Balanced, OneHeavyRowIsTheLimit) {
  // Row 5 alone keeps something: whoever holds it has all the work.
  const MaskSpec mask(256, 256, {{{5, 6, 0, 256}}});
  EXPECT_EQ(ShardMap::balanced(mask, 4).imbalance(mask), 4.0);
  EXPECT_EQ(ShardMap::balanced(MaskSpec(256, 256, {{}}), 4).imbalance(MaskSpec(256, 256, {{}})), 1.0);
}

TEST(Balanced, MostChunksBoundsTheSegmentsOfARank) {
  // Work in 16 of 1024 rows: 256 chunks of 4 rows share it out, 8 chunks do not.
  const MaskSpec mask(1024, 1024, {{{0, 16, 0, 1024}}});
  EXPECT_EQ(ShardMap::balanced(mask, 4).imbalance(mask), 1.0);
  for (const int64_t most : {2, 3, 4}) {
    const ShardMap map = ShardMap::balanced(mask, 4, most);
    EXPECT_EQ(map.imbalance(mask), 4.0);
    EXPECT_TRUE(map.covers_all());
    for (int64_t rank = 0; rank < 4; ++rank) EXPECT_LE(std::ssize(map.segments(rank)), most);
  }
}

TEST(Balanced, BatchEntriesAreAddedUp) {
  const MaskSpec mask(64, 64, {{{0, 32, 0, 64}}, {{32, 64, 0, 64}}});
  EXPECT_LE(ShardMap::balanced(mask, 4).imbalance(mask), 1.02);
}

TEST(Balanced, SmallAndEmptySequences) {
  for (int64_t length = 0; length <= 9; ++length) {
    for (int64_t world = 1; world <= 5; ++world) {
      const ShardMap map = ShardMap::balanced(causal(length), world);
      EXPECT_EQ(map.world(), world);
      EXPECT_TRUE(map.covers_all());
    }
  }
}

TEST(Balanced, Refusals) {
  EXPECT_THROW(ShardMap::balanced(MaskSpec::full(8, 9), 2), Error);
  EXPECT_THROW(ShardMap::balanced(causal(8), 0), Error);
  EXPECT_THROW(ShardMap::per_document({3, -1}, 2), Error);
  EXPECT_THROW(ShardMap::per_document({3}, 0), Error);
}

}  // namespace
}  // namespace ringspan
