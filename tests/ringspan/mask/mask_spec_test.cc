#include "ringspan/mask/mask_spec.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"

#include "tests/ringspan/mask/pair_grid.h"

namespace ringspan {
namespace {

using testing::PairGrid;

PairGrid grid_of(const MaskSpec& mask, int64_t batch = 0) {
  PairGrid grid(mask.q_len(), mask.kv_len());
  for (const Band& band : mask.bands(batch)) {
    for (int64_t i = band.q_begin; i < band.q_end; ++i) {
      for (int64_t j = band.kv_begin; j < band.kv_end; ++j) {
        if (band.lo <= j - i && j - i <= band.hi) grid.add(i, j);
      }
    }
  }
  return grid;
}

// The bands keep what `keeps` says, each pair once; keeps() and count_pairs() agree.
void expect_mask(const MaskSpec& mask, const std::function<bool(int64_t, int64_t)>& keeps, int64_t batch = 0) {
  const PairGrid expected = PairGrid::of(mask.q_len(), mask.kv_len(), keeps);
  EXPECT_EQ(grid_of(mask, batch), expected);
  EXPECT_EQ(mask.count_pairs(batch), expected.total());
  for (int64_t i = 0; i < mask.q_len(); ++i) {
    for (int64_t j = 0; j < mask.kv_len(); ++j) ASSERT_EQ(mask.keeps(batch, i, j), keeps(i, j));
  }
}

int64_t floor_quotient(int64_t value, int64_t divisor) {
  int64_t quotient = 0;
  while (quotient * divisor > value) --quotient;
  while ((quotient + 1) * divisor <= value) ++quotient;
  return quotient;
}

TEST(MaskSpec, FactoriesMatchTheirInequalityInBothCorners) {
  for (int64_t q_len = 0; q_len <= 9; ++q_len) {
    for (int64_t kv_len = 0; kv_len <= 9; ++kv_len) {
      expect_mask(MaskSpec::full(q_len, kv_len), [](int64_t, int64_t) { return true; });
      for (Corner corner : {Corner::kTopLeft, Corner::kBottomRight}) {
        const int64_t shift = corner == Corner::kTopLeft ? 0 : kv_len - q_len;
        expect_mask(MaskSpec::causal(q_len, kv_len, corner), [&](int64_t i, int64_t j) { return j <= i + shift; });
        for (int64_t left : {-1, 0, 1, 3, 100}) {
          for (int64_t right : {-1, 0, 2, 100}) {
            expect_mask(MaskSpec::window(q_len, kv_len, left, right, corner), [&](int64_t i, int64_t j) {
              return (left < 0 || j >= i + shift - left) && (right < 0 || j <= i + shift + right);
            });
          }
        }
        for (int64_t size : {1, 2, 3, 5, 20}) {
          expect_mask(MaskSpec::chunked(q_len, kv_len, size, corner), [&](int64_t i, int64_t j) {
            return floor_quotient(i + shift, size) == floor_quotient(j, size) && j <= i + shift;
          });
        }
        const std::vector<int64_t> prefix{0, 3, 50};
        const MaskSpec mask = MaskSpec::prefix(q_len, kv_len, prefix, corner);
        ASSERT_EQ(mask.num_lists(), 3);
        for (int64_t b = 0; b < 3; ++b) {
          expect_mask(mask, [&](int64_t i, int64_t j) { return j <= i + shift || j < prefix[b]; }, b);
        }
        ASSERT_FALSE(HasFailure()) << q_len << " x " << kv_len;
      }
    }
  }
}

TEST(MaskSpec, HugeLimitsMeanNoLimit) {
  const int64_t huge = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(MaskSpec::window(5, 7, huge, huge, Corner::kBottomRight), MaskSpec::full(5, 7));
  EXPECT_EQ(MaskSpec::chunked(5, 5, huge, Corner::kTopLeft), MaskSpec::causal(5, 5, Corner::kTopLeft));
  const MaskSpec open(
      5, 7, {{{.q_begin = -huge, .q_end = huge, .kv_begin = -huge, .kv_end = huge, .lo = -huge, .hi = huge}}});
  EXPECT_EQ(open, MaskSpec::full(5, 7));
}

// Queries 4..7 of 8 tokens against all keys: row i sees 5, 6, 7, 8 of them. Trimming a padded tail must not move the
// diagonal, so the positions are given, not inferred from the lengths.
TEST(MaskSpec, RectangularCausalSeesTheRightNumberOfKeys) {
  const auto row_counts = [](const MaskSpec& mask) {
    std::vector<int64_t> counts;
    for (int64_t i = 0; i < mask.q_len(); ++i) {
      int64_t count = 0;
      for (int64_t j = 0; j < mask.kv_len(); ++j) count += mask.keeps(0, i, j);
      counts.push_back(count);
    }
    return counts;
  };
  EXPECT_EQ(row_counts(MaskSpec::causal(4, 8, Corner::kBottomRight)), (std::vector<int64_t>{5, 6, 7, 8}));
  EXPECT_EQ(row_counts(MaskSpec::causal(4, 8, Corner::kTopLeft)), (std::vector<int64_t>{1, 2, 3, 4}));
  const MaskSpec trimmed(4, 7, {{{.q_end = 4, .kv_end = 7, .hi = 4}}});
  EXPECT_EQ(row_counts(trimmed), (std::vector<int64_t>{5, 6, 7, 7}));
}

TEST(MaskSpec, EntriesAreThoseOfTheirPlaces) {
  const MaskSpec prefixes = MaskSpec::prefix(4, 5, {0, 2, 5}, Corner::kTopLeft);
  const MaskSpec last = prefixes.entries(1, 2);
  ASSERT_EQ(last.num_lists(), 2);
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t j = 0; j < 5; ++j) {
      EXPECT_EQ(last.keeps(0, i, j), j <= i || j < 2);
      EXPECT_EQ(last.keeps(1, i, j), j <= i || j < 5);
    }
  }
  EXPECT_EQ(prefixes.entries(0, 3), prefixes);
  // One list serves any entries.
  EXPECT_EQ(MaskSpec::full(4, 5).entries(7, 9), MaskSpec::full(4, 5));
  EXPECT_THROW(prefixes.entries(2, 2), Error);
}

TEST(MaskSpec, CombinesAsSets) {
  std::mt19937_64 random(20240503);
  const auto number = [&](int64_t last) { return std::uniform_int_distribution<int64_t>(0, last)(random); };
  const auto random_mask = [&](int64_t num_lists) {
    std::vector<std::vector<Band>> lists(num_lists);
    for (auto& list : lists) {
      list.resize(number(3));
      for (Band& band : list) {
        band = {.q_begin = number(7), .q_end = number(8), .kv_begin = number(7), .kv_end = number(9)};
        if (number(1)) band.lo = number(12) - 6;
        if (number(1)) band.hi = number(12) - 6;
      }
    }
    return MaskSpec(8, 9, lists);
  };
  for (int draw = 0; draw < 2000; ++draw) {
    const MaskSpec a = random_mask(draw % 2 ? 2 : 1), b = random_mask(draw % 4 < 2 ? 2 : 1);
    const MaskSpec both = a & b, either = a | b;
    const int64_t num_lists = std::max(a.num_lists(), b.num_lists());
    ASSERT_EQ(both.num_lists(), num_lists);
    ASSERT_EQ(either.num_lists(), num_lists);
    for (int64_t batch = 0; batch < num_lists; ++batch) {
      expect_mask(both, [&](int64_t i, int64_t j) { return a.keeps(batch, i, j) && b.keeps(batch, i, j); }, batch);
      expect_mask(either, [&](int64_t i, int64_t j) { return a.keeps(batch, i, j) || b.keeps(batch, i, j); }, batch);
    }
    ASSERT_FALSE(HasFailure()) << draw;
  }
}

TEST(MaskSpec, EqualSetsOfOneBandAreEqual) {
  const MaskSpec causal = MaskSpec::causal(8, 8, Corner::kTopLeft);
  EXPECT_EQ(causal & MaskSpec::window(8, 8, 3, -1, Corner::kTopLeft), MaskSpec::window(8, 8, 3, 0, Corner::kTopLeft));
  EXPECT_EQ(causal | MaskSpec::full(8, 8), MaskSpec::full(8, 8));
  EXPECT_EQ(causal | MaskSpec(8, 8, {{{.q_end = 8, .kv_end = 8, .lo = 1}}}), MaskSpec::full(8, 8));
  EXPECT_EQ(causal & causal, causal);
  EXPECT_NE(causal, MaskSpec::full(8, 8));
}

TEST(MaskSpec, RefusesWhatDoesNotFit) {
  EXPECT_THROW(MaskSpec(-1, 4, {{}}), Error);
  EXPECT_THROW(MaskSpec(4, kMaxLength + 1, {{}}), Error);
  EXPECT_THROW(MaskSpec(4, 4, {}), Error);
  EXPECT_THROW(MaskSpec::chunked(4, 4, 0, Corner::kTopLeft), Error);
  EXPECT_THROW(MaskSpec::prefix(4, 4, {2, -1}, Corner::kTopLeft), Error);
  EXPECT_THROW(MaskSpec::full(4, 4) & MaskSpec::full(4, 5), Error);
  EXPECT_THROW(MaskSpec(4, 4, {{}, {}}) | MaskSpec(4, 4, {{}, {}, {}}), Error);
}

TEST(MaskSpec, BandsMeetingMissesNone) {
  std::mt19937_64 random(20240504);
  const auto number = [&](int64_t last) { return std::uniform_int_distribution<int64_t>(0, last)(random); };
  for (int draw = 0; draw < 500; ++draw) {
    std::vector<Band> bands(number(6));
    for (Band& band : bands) {
      band = {.q_begin = number(30), .q_end = number(31), .kv_begin = number(30), .kv_end = number(31)};
    }
    const MaskSpec mask(31, 31, {bands});
    const int64_t begin = number(30), end = begin + 1 + number(5);
    const std::span<const Band> found = mask.bands_meeting(0, begin, end);
    for (const Band& band : mask.bands(0)) {
      if (band.q_begin >= end || band.q_end <= begin) continue;
      ASSERT_NE(std::find(found.begin(), found.end(), band), found.end());
    }
  }
}

}  // namespace
}  // namespace ringspan
