#include "ringspan/shard/shard_map.h"

#include <string>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"

#include "tests/ringspan/shard/holders.h"

namespace ringspan {
namespace {

using testing::holders;
using Ranks = std::vector<std::vector<Segment>>;

std::string fault_of(int64_t seq_len, std::vector<Ranks> segments, std::vector<int64_t> local_rows = {}) {
  try {
    ShardMap::from_segments(seq_len, std::move(segments), std::move(local_rows));
  } catch (const Error& fault) {
    return fault.what();
  }
  return "";
}

TEST(ShardMap, TenPositionsOnTwoRanks) {
  EXPECT_EQ(holders(ShardMap::contiguous(10, 2)), "0000011111");
  EXPECT_EQ(holders(ShardMap::head_tail(10, 2)), "0011111000");
  EXPECT_EQ(holders(ShardMap::striped(10, 2)), "0101010101");
  EXPECT_EQ(holders(ShardMap::from_lengths({3, 0, 7})), "0002222222");
  EXPECT_EQ(ShardMap::head_tail(10, 2).positions(0), (std::vector<int64_t>{0, 1, 7, 8, 9}));
}

// place_of and positions are inverse, chunks begin where the header says, everything is held once.
TEST(ShardMap, FactoriesHoldEachPositionOnceForAnyLengthAndWorld) {
  for (int64_t world = 1; world <= 9; ++world) {
    for (int64_t seq_len = 0; seq_len <= 40; ++seq_len) {
      const auto chunk_of = [seq_len](int64_t position, int64_t num_chunks) {
        int64_t chunk = 0;
        while ((chunk + 1) * seq_len / num_chunks <= position) ++chunk;
        return chunk;
      };
      std::string contiguous, head_tail, striped;
      for (int64_t p = 0; p < seq_len; ++p) {
        const int64_t half = chunk_of(p, 2 * world);
        contiguous += static_cast<char>('0' + chunk_of(p, world));
        head_tail += static_cast<char>('0' + std::min(half, 2 * world - 1 - half));
        striped += static_cast<char>('0' + p % world);
      }
      EXPECT_EQ(holders(ShardMap::contiguous(seq_len, world)), contiguous);
      EXPECT_EQ(holders(ShardMap::head_tail(seq_len, world)), head_tail);
      EXPECT_EQ(holders(ShardMap::striped(seq_len, world)), striped);
      for (const ShardMap& map : {ShardMap::contiguous(seq_len, world), ShardMap::head_tail(seq_len, world),
                                  ShardMap::striped(seq_len, world)}) {
        EXPECT_EQ(map.world(), world);
        EXPECT_TRUE(map.covers_all());
        EXPECT_EQ(map.first_hole(), std::nullopt);
        for (int64_t rank = 0; rank < world; ++rank) {
          const std::vector<int64_t> positions = map.positions(rank);
          ASSERT_EQ(static_cast<int64_t>(positions.size()), map.local_rows(rank));
          for (size_t row = 0; row < positions.size(); ++row) {
            ASSERT_EQ(map.place_of(positions[row]), (ShardMap::RankRow{rank, static_cast<int64_t>(row)}));
          }
        }
        EXPECT_EQ(map.place_of(seq_len), std::nullopt);
        EXPECT_EQ(map.place_of(-1), std::nullopt);
      }
    }
  }
}

TEST(ShardMap, NeighboursThatContinueEachOtherAreOneSegment) {
  EXPECT_EQ(ShardMap::head_tail(16, 2).segments(1).size(), 1u);
  EXPECT_EQ(ShardMap::head_tail(16, 2).segments(0).size(), 2u);
  const ShardMap map = ShardMap::from_segments(
      8, {{{{.local_row = 2, .begin = 2, .length = 2}, {.local_row = 0, .begin = 0, .length = 2}, {.begin = 7}},
           {{.local_row = 0, .begin = 4, .length = 2, .stride = 2}, {.local_row = 2, .begin = 5, .length = 1}}}});
  EXPECT_EQ(std::vector<Segment>(map.segments(0).begin(), map.segments(0).end()),
            (std::vector<Segment>{{.local_row = 0, .begin = 0, .length = 4}}));
  EXPECT_EQ(map.segments(1).size(), 2u);
}

TEST(ShardMap, PaddingRowsAndPartialCover) {
  const ShardMap map = ShardMap::from_segments(
      9, {{{{.local_row = 1, .begin = 4, .length = 2}}, {{.local_row = 0, .begin = 0, .length = 2, .stride = 3}}, {}}},
      {5, 2, 3});
  EXPECT_EQ(map.positions(0), (std::vector<int64_t>{-1, 4, 5, -1, -1}));
  EXPECT_EQ(map.positions(1), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(map.positions(2), (std::vector<int64_t>{-1, -1, -1}));
  EXPECT_FALSE(map.covers_all());
  EXPECT_EQ(map.first_hole(), 1);
  EXPECT_EQ(map.place_of(3), (ShardMap::RankRow{1, 1}));
  EXPECT_EQ(map.place_of(2), std::nullopt);
}

TEST(ShardMap, ListsPerBatchEntry) {
  const ShardMap map = ShardMap::from_segments(4, {{{{.begin = 0, .length = 1}}, {{.begin = 1, .length = 3}}},
                                                   {{{.begin = 1, .length = 3}}, {{.begin = 0, .length = 1}}}});
  EXPECT_EQ(map.num_lists(), 2);
  EXPECT_EQ(map.local_rows(0), 3);  // the longer of its entries
  EXPECT_EQ(map.positions(0, 0), (std::vector<int64_t>{0, -1, -1}));
  EXPECT_EQ(map.positions(0, 1), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(holders(map, 0), "0111");
  EXPECT_EQ(holders(map, 1), "1000");
  EXPECT_EQ(map.place_of(0, 1), (ShardMap::RankRow{1, 0}));
  EXPECT_TRUE(map.covers_all());
}

TEST(ShardMap, OverlapIsRefusedNamingBothPlaces) {
  const std::string fault = fault_of(10, {{{{.begin = 0, .length = 6}}, {{.begin = 5, .length = 5}}}});
  EXPECT_NE(fault.find("position 5 is held twice"), std::string::npos) << fault;
  EXPECT_NE(fault.find("rank 0 segment {local_row 0, begin 0, length 6"), std::string::npos) << fault;
  EXPECT_NE(fault.find("rank 1 segment {local_row 0, begin 5, length 5"), std::string::npos) << fault;
  const std::string rows =
      fault_of(10, {{{{.local_row = 0, .begin = 0, .length = 3}, {.local_row = 2, .begin = 5, .length = 2}}}});
  EXPECT_NE(rows.find("share local rows"), std::string::npos) << rows;
}

// Every pair of progressions within 24 positions, against their enumeration.
TEST(ShardMap, OverlapOfStridesIsExact) {
  for (int64_t stride_a = 1; stride_a <= 6; ++stride_a) {
    for (int64_t stride_b = 1; stride_b <= 6; ++stride_b) {
      for (int64_t begin = 0; begin <= 8; ++begin) {
        for (int64_t length = 2; length <= 3; ++length) {
          const Segment a{.begin = 3, .length = 4, .stride = stride_a};
          const Segment b{.begin = begin, .length = length, .stride = stride_b};
          bool meet = false;
          for (int64_t x = 0; x < a.length; ++x) {
            for (int64_t y = 0; y < b.length; ++y) meet |= a.position(x) == b.position(y);
          }
          const std::string fault = fault_of(24, {{{a}, {b}}});
          ASSERT_EQ(!fault.empty(), meet) << stride_a << " " << stride_b << " " << begin << " " << fault;
        }
      }
    }
  }
}

TEST(ShardMap, RefusesWhatDoesNotFit) {
  EXPECT_THROW(ShardMap::contiguous(-1, 2), Error);
  EXPECT_THROW(ShardMap::head_tail(8, 0), Error);
  EXPECT_THROW(ShardMap::striped(kMaxLength + 1, 2), Error);
  EXPECT_THROW(ShardMap::from_lengths({}), Error);
  EXPECT_THROW(ShardMap::from_lengths({3, -1}), Error);
  EXPECT_NE(fault_of(8, {}), "");
  EXPECT_NE(fault_of(8, {{}}), "");
  EXPECT_NE(fault_of(8, {{{}, {}}, {{}}}), "");
  EXPECT_NE(fault_of(8, {{{{.begin = -1, .length = 1}}}}), "");
  EXPECT_NE(fault_of(8, {{{{.begin = 0, .length = -1}}}}), "");
  EXPECT_NE(fault_of(8, {{{{.begin = 0, .length = 2, .stride = 0}}}}), "");
  EXPECT_NE(fault_of(8, {{{{.begin = 6, .length = 3}}}}), "");
  EXPECT_NE(fault_of(8, {{{{.begin = 0, .length = 3, .stride = 4}}}}), "");
  EXPECT_NE(fault_of(8, {{{{.begin = 0, .length = 2, .stride = int64_t{1} << 62}}}}), "");
  EXPECT_NE(fault_of(8, {{{{.begin = 0, .length = 3}}}}, {2}), "");
  EXPECT_NE(fault_of(8, {{{{.begin = 0, .length = 3}}}}, {3, 3}), "");
  EXPECT_EQ(fault_of(8, {{{{.begin = 0, .length = 2, .stride = 7}}}}), "");
}

TEST(ShardMap, WorkCountsKeptPairsPerRank) {
  const MaskSpec causal = MaskSpec::causal(16, 16, Corner::kTopLeft);
  EXPECT_EQ(ShardMap::striped(16, 4).work(causal), (std::vector<int64_t>{28, 32, 36, 40}));
  EXPECT_EQ(ShardMap::head_tail(16, 4).work(causal), (std::vector<int64_t>{34, 34, 34, 34}));
  for (const ShardMap& map : {ShardMap::contiguous(16, 3), ShardMap::head_tail(16, 3), ShardMap::striped(16, 3),
                              ShardMap::from_lengths({3, 5, 2, 6}), ShardMap::from_lengths({7, 0, 9})}) {
    for (const MaskSpec& mask :
         {causal, MaskSpec::window(16, 16, 2, 1, Corner::kTopLeft), MaskSpec::chunked(16, 16, 5, Corner::kTopLeft),
          documents_by_lengths(16, {{3, 5, 2, 6}, {4, 4, 4, 0}}, {})}) {
      std::vector<int64_t> expected(map.world(), 0);
      for (int64_t rank = 0; rank < map.world(); ++rank) {
        for (int64_t position : map.positions(rank)) {
          for (int64_t b = 0; b < mask.num_lists(); ++b) {
            for (int64_t j = 0; j < 16; ++j) expected[rank] += mask.keeps(b, position, j);
          }
        }
      }
      EXPECT_EQ(map.work(mask), expected);
    }
  }
  EXPECT_THROW(ShardMap::striped(15, 4).work(causal), Error);
}

TEST(ShardMap, PrintsWhoHoldsWhat) {
  EXPECT_EQ(ShardMap::head_tail(10, 2).str(),
            "10 positions on 2 ranks\n"
            "  rank 0: 5 rows, [0..1] at row 0, [7..9] at row 2\n"
            "  rank 1: 5 rows, [2..6] at row 0\n");
  EXPECT_EQ(ShardMap::striped(5, 2).str(),
            "5 positions on 2 ranks\n"
            "  rank 0: 3 rows, [0..4 by 2] at row 0\n"
            "  rank 1: 2 rows, [1..3 by 2] at row 0\n");
}

}  // namespace
}  // namespace ringspan
