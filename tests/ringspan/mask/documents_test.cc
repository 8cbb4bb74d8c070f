#include <algorithm>
#include <random>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"
#include "ringspan/mask/mask_spec.h"

#include "tests/ringspan/mask/pair_grid.h"

namespace ringspan {
namespace {

using testing::PairGrid;
using Kind = DocumentRule::Kind;

bool inside_keeps(const DocumentRule& rule, int64_t i, int64_t j) {
  switch (rule.kind) {
    case Kind::kFull: return true;
    case Kind::kCausal: return j <= i;
    case Kind::kWindow: return (rule.left < 0 || i - j <= rule.left) && (rule.right < 0 || j - i <= rule.right);
    case Kind::kChunked: return i / rule.size == j / rule.size && j <= i;
  }
  return false;
}

PairGrid expected_grid(const std::vector<int64_t>& ids, const DocumentRule& rule) {
  std::vector<int64_t> inside;  // how many of the same document came before
  for (size_t i = 0; i < ids.size(); ++i) inside.push_back(std::count(ids.begin(), ids.begin() + i, ids[i]));
  const int64_t length = static_cast<int64_t>(ids.size());
  return PairGrid::of(length, length, [&](int64_t i, int64_t j) {
    return ids[i] != 0 && ids[i] == ids[j] && inside_keeps(rule, inside[i], inside[j]);
  });
}

PairGrid grid_of(const MaskSpec& mask, int64_t batch) {
  PairGrid grid(mask.q_len(), mask.kv_len());
  for (const Band& band : mask.bands(batch)) {
    for (int64_t i = 0; i < mask.q_len(); ++i) {
      for (int64_t j = 0; j < mask.kv_len(); ++j) {
        if (band.keeps(i, j)) grid.add(i, j);
      }
    }
  }
  return grid;
}

const DocumentRule kRules[] = {
    {.kind = Kind::kFull},
    {.kind = Kind::kCausal},
    {.kind = Kind::kWindow, .left = 2, .right = 0},
    {.kind = Kind::kWindow, .left = 1, .right = 1},
    {.kind = Kind::kWindow, .left = -1, .right = 2},
    {.kind = Kind::kChunked, .size = 1},
    {.kind = Kind::kChunked, .size = 3},
};

TEST(Documents, ByIdsInAnyOrder) {
  std::mt19937_64 random(20240505);
  const auto number = [&](int64_t last) { return std::uniform_int_distribution<int64_t>(0, last)(random); };
  for (int draw = 0; draw < 400; ++draw) {
    std::vector<std::vector<int64_t>> ids(1 + draw % 2, std::vector<int64_t>(number(16)));
    for (auto& list : ids) {
      list.resize(ids[0].size());
      int64_t id = number(3);
      for (int64_t& entry : list) {
        if (number(2) == 0) id = number(3);  // runs of a few positions, interleaved
        entry = id;
      }
    }
    for (const DocumentRule& rule : kRules) {
      const MaskSpec mask = documents_by_ids(ids, rule);
      ASSERT_EQ(mask.num_lists(), static_cast<int64_t>(ids.size()));
      for (size_t b = 0; b < ids.size(); ++b) ASSERT_EQ(grid_of(mask, b), expected_grid(ids[b], rule)) << draw;
      for (size_t b = 0; b < ids.size(); ++b) {
        for (const Band& band : mask.bands(b)) ASSERT_EQ(band, tighten(band));
      }
    }
  }
}

TEST(Documents, ByLengthsAreNeighbours) {
  for (const DocumentRule& rule : kRules) {
    for (const std::vector<int64_t>& lengths :
         {std::vector<int64_t>{3, 5, 2, 6}, {3, 0, 5}, {1, 1, 1}, {0, 0}, {}, {16}}) {
      std::vector<int64_t> ids;
      for (size_t d = 0; d < lengths.size(); ++d) ids.insert(ids.end(), lengths[d], static_cast<int64_t>(d + 1));
      ids.resize(16, 0);
      const MaskSpec mask = documents_by_lengths(16, {lengths}, rule);
      EXPECT_EQ(grid_of(mask, 0), expected_grid(ids, rule));
      EXPECT_EQ(mask, documents_by_ids({ids}, rule));
    }
  }
}

// One document with 2 valid tokens in 8 slots: 3 pairs, all in the first two rows.
TEST(Documents, TwoTokensAndPadding) {
  const MaskSpec mask = documents_by_lengths(8, {{2}}, {});
  EXPECT_EQ(mask.count_pairs(0), 3);
  EXPECT_TRUE(mask.keeps(0, 1, 0));
  EXPECT_FALSE(mask.keeps(0, 2, 0));
  EXPECT_FALSE(mask.keeps(0, 2, 2));
}

TEST(Documents, EachDocumentIsOneBand) {
  std::vector<int64_t> lengths(10000, 7);
  const MaskSpec mask = documents_by_lengths(70000, {lengths}, {});
  EXPECT_EQ(mask.bands(0).size(), 10000u);
  EXPECT_EQ(mask.count_pairs(0), 10000 * 28);
  EXPECT_EQ((mask & MaskSpec::window(70000, 70000, 2, 0, Corner::kTopLeft)).count_pairs(0), 10000 * (1 + 2 + 5 * 3));
}

TEST(Documents, RefusesWhatDoesNotFit) {
  EXPECT_THROW(documents_by_ids({}, {}), Error);
  EXPECT_THROW(documents_by_ids({{1, 1}, {1}}, {}), Error);
  EXPECT_THROW(documents_by_ids({{1, -1}}, {}), Error);
  EXPECT_THROW(documents_by_lengths(8, {{5, 4}}, {}), Error);
  EXPECT_THROW(documents_by_lengths(8, {{5, -1}}, {}), Error);
  EXPECT_THROW(documents_by_lengths(-1, {{}}, {}), Error);
  EXPECT_THROW(documents_by_lengths(8, {}, {}), Error);
  EXPECT_THROW(documents_by_lengths(8, {{8}}, {.kind = Kind::kChunked, .size = 0}), Error);
}

TEST(Documents, RefusesMoreBandsThanItCanHold) {
  std::vector<int64_t> ids(6000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = 1 + static_cast<int64_t>(i % 2);
  EXPECT_THROW(documents_by_ids({ids}, {.kind = Kind::kFull}), Unsupported);
  EXPECT_EQ(documents_by_ids({ids}, {.kind = Kind::kWindow, .left = 1, .right = 0}).count_pairs(0), 2 * (1 + 2999 * 2));
}

}  // namespace
}  // namespace ringspan
