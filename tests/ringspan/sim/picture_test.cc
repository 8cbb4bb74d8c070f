#include "ringspan/sim/picture.h"

#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ringspan/base/error.h"

#include "tests/ringspan/sim/sim_cases.h"

namespace ringspan {
namespace {

int64_t cell_holding(const CellAxis& axis, int64_t position) {
  int64_t cell = 0;
  while (axis.begins[cell + 1] <= position) ++cell;
  return cell;
}

void expect_owners(const CellAxis& axis, const ShardMap& map, int64_t batch) {
  ASSERT_EQ(axis.begins.front(), 0);
  ASSERT_EQ(axis.begins.back(), map.seq_len());
  for (int64_t cell = 0; cell < axis.num_cells(); ++cell) {
    ASSERT_LT(axis.begins[cell], axis.begins[cell + 1]);
    std::map<int64_t, int64_t> counts;
    std::vector<int64_t> order;
    for (int64_t position = axis.begins[cell]; position < axis.begins[cell + 1]; ++position) {
      const auto place = map.place_of(position, batch);
      if (place && counts[place->rank]++ == 0) order.push_back(place->rank);
    }
    std::vector<CellOwner> expected;
    for (const int64_t rank : order) expected.push_back({.rank = rank, .positions = counts[rank]});
    EXPECT_EQ(axis.owners[cell], expected) << "cell " << cell;
  }
}

void expect_picture(const MaskSpec& mask, const ShardMap& q_map, const ShardMap& kv_map, int64_t batch = 0) {
  const MaskPicture picture = picture_of(mask, q_map, kv_map, batch);
  expect_owners(picture.q, q_map, batch);
  expect_owners(picture.kv, kv_map, batch);
  std::vector<std::vector<int64_t>> kept(picture.q.num_cells(), std::vector<int64_t>(picture.kv.num_cells(), 0));
  for (int64_t i = 0; i < mask.q_len(); ++i) {
    for (int64_t j = 0; j < mask.kv_len(); ++j) {
      if (mask.keeps(batch, i, j)) ++kept[cell_holding(picture.q, i)][cell_holding(picture.kv, j)];
    }
  }
  EXPECT_EQ(picture.kept, kept);
}

TEST(Picture, TheGridOfTheHeader) {
  const ShardMap map = ShardMap::head_tail(256, 2);
  const MaskPicture picture = picture_of(MaskSpec::causal(256, 256, Corner::kTopLeft), map, map);
  ASSERT_EQ(picture.q.num_cells(), 128);
  EXPECT_EQ(picture.kept[0][0], 3);
  EXPECT_EQ(picture.kept[1][0], 4);
  EXPECT_EQ(picture.kept[0][1], 0);
  EXPECT_EQ(picture.kept[127][127], 3);
  for (const int64_t cell : {0, 1, 127}) {
    EXPECT_EQ(picture.q.owners[cell], (std::vector<CellOwner>{{.rank = 0, .positions = 2}}));
  }
}

TEST(Picture, IsWhatCountingPairByPairGives) {
  const std::vector<MaskSpec> masks = {
      MaskSpec::full(301, 301),
      MaskSpec::causal(301, 301, Corner::kTopLeft),
      MaskSpec::window(301, 301, 40, 3, Corner::kTopLeft),
      MaskSpec::chunked(301, 301, 23, Corner::kTopLeft),
      documents_by_lengths(301, {{7, 0, 150, 1, 90}}, {}),
  };
  const std::vector<ShardMap> maps = {
      ShardMap::contiguous(301, 3), ShardMap::head_tail(301, 4), ShardMap::striped(301, 5), ShardMap::striped(301, 1),
      ShardMap::per_document({7, 150, 1, 90, 53}, 4),
      // Rank 1 holds 20..29 and 5..14 in this order; nobody the rest but 50..60.
      ShardMap::from_segments(
          301, {{{{.local_row = 0, .begin = 50, .length = 11}},
                 {{.local_row = 0, .begin = 20, .length = 10}, {.local_row = 12, .begin = 5, .length = 10}}}})};
  for (size_t m = 0; m < masks.size(); ++m) {
    for (size_t s = 0; s < maps.size(); ++s) {
      SCOPED_TRACE(concat("mask ", m, " map ", s));
      expect_picture(masks[m], maps[s], maps[0]);
    }
  }
  expect_picture(MaskSpec::causal(5, 300, Corner::kBottomRight), ShardMap::contiguous(5, 8), ShardMap::striped(300, 8));
}

TEST(Picture, ShowsTheBatchEntryThatIsAskedFor) {
  const MaskSpec mask = documents_by_lengths(200, {{{100, 100}, {30, 170}}}, {});
  for (const int64_t batch : {0, 1}) {
    SCOPED_TRACE(batch);
    expect_picture(mask, ShardMap::head_tail(200, 2), ShardMap::head_tail(200, 2), batch);
  }
}

TEST(Picture, HasFewerCellsWhereEveryOtherPositionHasAnotherOwner) {
  const MaskSpec mask = MaskSpec::full(1000, 1000);
  const auto cells = [&](const ShardMap& map) { return picture_of(mask, map, map).q.num_cells(); };
  EXPECT_EQ(cells(ShardMap::head_tail(1000, 4)), 128);
  EXPECT_EQ(cells(ShardMap::striped(1000, 4)), 32);
}

TEST(Picture, RanksAreEvenlyChosen) {
  EXPECT_EQ(pictured_ranks(1), (std::vector<int64_t>{0}));
  EXPECT_EQ(pictured_ranks(3), (std::vector<int64_t>{0, 1, 2}));
  const std::vector<int64_t> many = pictured_ranks(1000);
  EXPECT_EQ(many.size(), 32u);
  EXPECT_EQ(many.front(), 0);
  EXPECT_EQ(many.back(), 999);
  for (size_t k = 1; k < many.size(); ++k) EXPECT_NEAR(static_cast<double>(many[k] - many[k - 1]), 999.0 / 31, 1.0);
}

Plan causal_ring(int64_t world) {
  const Problem problem{
      .batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = 96, .kv_len = 96, .qk_dim = 8, .v_dim = 8, .scale = 1};
  return build_plan(problem, MaskSpec::causal(96, 96, Corner::kTopLeft), ShardMap::head_tail(96, world),
                    Schedule::kRing);
}

TEST(Picture, PairsOfAllRanksAreThoseOfTheMask) {
  const auto json = nlohmann::json::parse(picture_json(causal_ring(4), "a note"));
  EXPECT_EQ(json["note"], "a note");
  EXPECT_EQ(json["schedule"], "ring");
  EXPECT_TRUE(json["batch"].is_null());
  int64_t pairs = 0;
  for (const auto& rank : json["pairs"]) {
    EXPECT_EQ(rank.size(), 4u);
    for (const auto& step : rank) pairs += step.get<int64_t>();
  }
  EXPECT_EQ(pairs, int64_t{2 * 4 * 96 * 97 / 2});
  int64_t kept = 0;
  for (const auto& row : json["mask"]["kept"]) {
    for (const auto& cell : row) kept += cell.get<int64_t>();
  }
  EXPECT_EQ(kept, 96 * 97 / 2);
}

TEST(Picture, TimesAreThoseOfTheSimulation) {
  const Plan plan = causal_ring(40);
  const Machine machine = testing::round_machine();
  const Simulation simulation = simulate(plan, machine, {.exchange = Exchange::kP2p, .steps_of = pictured_ranks(40)});
  const auto json = nlohmann::json::parse(picture_json(plan, simulation, machine, ""));
  EXPECT_EQ(json["times"]["machine"], "round");
  EXPECT_EQ(json["times"]["forward"]["end"], simulation.forward.seconds);  // this machine's calls cost nothing else
  ASSERT_EQ(json["ranks"].size(), 32u);
  for (size_t k = 0; k < 32; ++k) {
    const auto& shown = json["times"]["backward"]["ranks"][k];
    const detail::RankTimes& rank = simulation.backward.ranks[json["ranks"][k].get<int64_t>()];
    EXPECT_EQ(shown["end"], rank.end);
    ASSERT_EQ(shown["steps"].size(), rank.steps.size());
    EXPECT_EQ(shown["steps"].back()["compute_end"], rank.steps.back().compute_end);
  }
  EXPECT_THROW(picture_json(plan, simulate(plan, machine, {.exchange = Exchange::kP2p}), machine, ""), Error);
}

}  // namespace
}  // namespace ringspan
