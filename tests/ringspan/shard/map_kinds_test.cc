// Shard maps by name: every kind is the map that its constructor makes, and what does not fit is refused.
#include "ringspan/shard/map_kinds.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

constexpr int64_t kLength = 13, kWorld = 3;

MaskSpec mask_of() { return MaskSpec::causal(kLength, kLength, Corner::kTopLeft); }

// The positions that each rank holds, in the order of its rows.
using Positions = std::vector<std::vector<int64_t>>;
Positions positions_of(const ShardMap& map) {
  Positions all;
  for (int64_t rank = 0; rank < map.world(); ++rank) all.push_back(map.positions(rank));
  return all;
}

TEST(MapKindsTest, EveryNameIsTheMapThatItSays) {
  const auto parsed = [](const char* text) { return positions_of(parse_shard_map(text, mask_of(), kLength, kWorld)); };
  EXPECT_EQ(parsed("contiguous"), (Positions{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11, 12}}));
  const Positions head_tail{{0, 1, 10, 11, 12}, {2, 3, 8, 9}, {4, 5, 6, 7}};
  EXPECT_EQ(parsed("head_tail"), head_tail);
  EXPECT_EQ(parsed("zigzag"), head_tail);
  EXPECT_EQ(parsed("striped"), (Positions{{0, 3, 6, 9, 12}, {1, 4, 7, 10}, {2, 5, 8, 11}}));
  EXPECT_EQ(parsed("lengths:2,0,11"), (Positions{{0, 1}, {}, {2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}}));
  EXPECT_EQ(parsed("balanced"), positions_of(ShardMap::balanced(mask_of(), kWorld)));
  EXPECT_EQ(parsed("per_document:6,7"), positions_of(ShardMap::per_document({6, 7}, kWorld, kLength)));
}

TEST(MapKindsTest, PlainNamesNeedNothingElse) {
  for (const std::string& name : plain_map_names()) {
    EXPECT_TRUE(parse_shard_map(name, mask_of(), kLength, kWorld).covers_all()) << name;
  }
  EXPECT_EQ(plain_map_names().size(), 4U);
}

TEST(MapKindsTest, CodesAreTheFirstPlaces) {
  const std::pair<MapCode, const char*> codes[] = {{kContiguousMap, "contiguous"},
                                                   {kHeadTailMap, "head_tail"},
                                                   {kStripedMap, "striped"},
                                                   {kLengthsMap, "lengths"},
                                                   {kSegmentsMap, "segments"}};
  EXPECT_EQ(std::size(codes), static_cast<size_t>(kNumMapCodes));
  for (const auto& [code, name] : codes) EXPECT_EQ(map_kinds()[static_cast<size_t>(code)].name, name);
}

TEST(MapKindsTest, WhatDoesNotFitIsRefused) {
  const std::pair<const char*, const char*> wrong[] = {
      {"spiral", "use contiguous, head_tail (or zigzag), striped"},
      {"segments", "is unknown"},
      {"lengths", "is unknown"},
      {"contiguous:3", "is unknown"},
      {"lengths:3,10", "2 were given for 3 ranks"},
      {"lengths:3,3,3", "add up to 9 positions and the sequence has 13"},
      {"lengths:3,x,3", "\"x\" in \"lengths:3,x,3\" is not a whole number"},
  };
  for (const auto& [text, part] : wrong) {
    std::string said;
    try {
      parse_shard_map(text, mask_of(), kLength, kWorld);
    } catch (const Error& error) {
      said = error.what();
    }
    EXPECT_NE(said.find(part), std::string::npos) << text << ": " << said;
  }
}

}  // namespace
}  // namespace ringspan
