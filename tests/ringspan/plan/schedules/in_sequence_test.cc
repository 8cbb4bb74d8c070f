#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/plan/schedule.h"
#include "ringspan/plan/schedules/builder.h"

#include "tests/ringspan/plan/plan_cases.h"

namespace ringspan::detail {
namespace {

using testing::causal;
using testing::maps_of_sixteen;
using testing::NamedMap;
using testing::problem_of;

std::vector<int64_t> ranks_of(int64_t begin, int64_t end) {
  std::vector<int64_t> ranks(static_cast<size_t>(end - begin));
  std::iota(ranks.begin(), ranks.end(), begin);
  return ranks;
}

// The position of each row of the buffer, -1 for none: by its segments, and by where the pieces put the shards' rows.
std::vector<int64_t> positions_by_segments(const TeamRows& team) {
  std::vector<int64_t> positions(static_cast<size_t>(team.buffer.count), -1);
  for (const Segment& segment : team.buffer.segments.at(0)) {
    for (int64_t i = 0; i < segment.length; ++i) positions.at(segment.local_row + i) = segment.position(i);
  }
  return positions;
}

std::vector<int64_t> positions_by_pieces(const TeamRows& team, const ShardMap& map, const std::vector<int64_t>& ranks) {
  std::vector<int64_t> positions(static_cast<size_t>(team.buffer.count), -2);
  for (size_t shard = 0; shard < ranks.size(); ++shard) {
    const std::vector<int64_t> held = map.positions(ranks[shard]);
    int64_t next = 0;
    for (const Piece& piece : team.pieces[shard]) {
      EXPECT_EQ(piece.rows.begin, next) << "pieces are all rows of a shard, in ascending order";
      for (int64_t row = piece.rows.begin; row < piece.rows.end; ++row) {
        int64_t& position = positions.at(piece.row + (row - piece.rows.begin) * piece.stride);
        EXPECT_EQ(position, -2) << "two rows in one place";
        position = held[row];
      }
      next = piece.rows.end;
    }
    EXPECT_EQ(next, map.local_rows(ranks[shard]));
  }
  return positions;
}

TEST(InSequence, EveryRowHasItsPlace) {
  std::vector<NamedMap> maps = maps_of_sixteen();
  maps.push_back({"documents", ShardMap::per_document({3, 1, 7, 5}, 3)});
  maps.push_back({"fewer positions than ranks", ShardMap::striped(3, 5)});
  maps.push_back({"longer stripes", ShardMap::striped(23, 5)});
  for (const auto& [name, map] : maps) {
    for (int64_t begin = 0; begin < map.world(); ++begin) {
      for (int64_t end = begin + 1; end <= map.world(); ++end) {
        SCOPED_TRACE(::testing::Message() << name << ", ranks " << begin << " to " << end);
        const std::vector<int64_t> ranks = ranks_of(begin, end);
        const TeamRows team = in_sequence(map, ranks);
        EXPECT_EQ(positions_by_pieces(team, map, ranks), positions_by_segments(team));
      }
    }
  }
}

// The grid of the header.
TEST(InSequence, HeadsAndTailsMakeOneSegmentAndPaddingComesLast) {
  const ShardMap map =
      ShardMap::from_segments(8,
                              {{{{.local_row = 0, .begin = 0, .length = 2}, {.local_row = 2, .begin = 6, .length = 2}},
                                {{.local_row = 0, .begin = 2, .length = 4}}}},
                              {4, 5});
  const TeamRows team = in_sequence(map, ranks_of(0, 2));
  EXPECT_EQ(team.buffer.segments, (std::vector<std::vector<Segment>>{{{.local_row = 0, .begin = 0, .length = 8}}}));
  EXPECT_EQ(positions_by_pieces(team, map, {0, 1}), (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, -1}));
  EXPECT_EQ(team.pieces[0].size(), 2u);
  EXPECT_EQ(team.pieces[1].size(), 2u);
}

TEST(InSequence, StripesMakeOneSegment) {
  for (const int64_t length : {4, 5, 11, 12, 40}) {
    const TeamRows team = in_sequence(ShardMap::striped(length, 4), ranks_of(0, 4));
    EXPECT_EQ(team.buffer.segments.at(0).size(), 1u) << length;
    for (const auto& pieces : team.pieces) EXPECT_EQ(pieces.size(), 1u) << length;
  }
}

// Shards of many segments would be as many messages.
TEST(InSequence, ManyPiecesStayInTheOrderOfTheRanks) {
  const ShardMap map = ShardMap::per_document(std::vector<int64_t>(20, 8), 2);
  const TeamRows team = in_sequence(map, ranks_of(0, 2));
  EXPECT_EQ(team.pieces[0].size(), 1u);
  EXPECT_EQ(team.pieces[1].size(), 1u);
  EXPECT_EQ(team.pieces[1][0].row, map.local_rows(0));
}

// What it is for: the ranks that compute see one triangle, however many ranks there are.
TEST(InSequence, UlyssesHasOneTileUnderACausalMask) {
  const ShardMap map = ShardMap::head_tail(64, 4);
  for (const Schedule& schedule : {Schedule::kUlysses, Schedule::hybrid(2)}) {
    const RankPlan part = build_plan(problem_of(64, 64), causal(64), map, schedule).rank(1);
    for (const Step& step : part.forward) EXPECT_LE(step.tiles.size(), schedule.inner == 2 ? 3u : 1u) << step.step;
  }
}

}  // namespace
}  // namespace ringspan::detail
