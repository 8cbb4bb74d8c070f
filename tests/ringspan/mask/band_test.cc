#include "ringspan/mask/band.h"

#include <algorithm>
#include <random>
#include <utility>

#include <gtest/gtest.h>

#include "tests/ringspan/mask/pair_grid.h"

namespace ringspan {
namespace {

using testing::PairGrid;

constexpr int64_t kSize = 9;

// The definition, written out again.
bool in_band(const Band& band, int64_t i, int64_t j) {
  if (i < band.q_begin || i >= band.q_end) return false;
  if (j < band.kv_begin || j >= band.kv_end) return false;
  return j >= i + band.lo && j <= i + band.hi;
}

PairGrid grid_of(const Band& band) {
  return PairGrid::of(kSize, kSize, [&](int64_t i, int64_t j) { return in_band(band, i, j); });
}

PairGrid grid_of(const std::vector<Band>& bands) {
  PairGrid grid(kSize, kSize);
  for (const Band& band : bands) {
    for (int64_t i = 0; i < kSize; ++i) {
      for (int64_t j = 0; j < kSize; ++j) {
        if (in_band(band, i, j)) grid.add(i, j);
      }
    }
  }
  return grid;
}

class RandomBands {
 public:
  int64_t number(int64_t first, int64_t last) { return std::uniform_int_distribution<int64_t>(first, last)(random_); }

  Band band() {
    Band band{.q_begin = number(0, kSize),
              .q_end = number(0, kSize),
              .kv_begin = number(0, kSize),
              .kv_end = number(0, kSize)};
    if (number(0, 9) > 0 && band.q_begin > band.q_end) std::swap(band.q_begin, band.q_end);
    if (number(0, 9) > 0 && band.kv_begin > band.kv_end) std::swap(band.kv_begin, band.kv_end);
    if (number(0, 2) > 0) band.lo = number(-kSize, kSize);
    if (number(0, 2) > 0) band.hi = number(0, 9) > 0 ? std::max(band.lo, number(-kSize, kSize)) : number(-kSize, kSize);
    return band;
  }

 private:
  std::mt19937_64 random_{20240501};
};

// No bound of a tight band can move without losing a pair.
void expect_tight(const Band& band) {
  const PairGrid grid = grid_of(band);
  for (int64_t Band::* side : {&Band::q_begin, &Band::q_end, &Band::kv_begin, &Band::kv_end, &Band::lo, &Band::hi}) {
    const bool lower = side == &Band::q_begin || side == &Band::kv_begin || side == &Band::lo;
    Band narrower = band;
    narrower.*side += lower ? 1 : -1;
    EXPECT_NE(grid_of(narrower), grid);
  }
}

TEST(Band, TightenKeepsThePairsInTheSmallestBounds) {
  RandomBands random;
  int num_empty = 0;
  for (int draw = 0; draw < 4000; ++draw) {
    const Band band = random.band(), tight = tighten(band);
    ASSERT_EQ(grid_of(tight), grid_of(band)) << draw;
    const bool empty = grid_of(band).total() == 0;
    ASSERT_EQ(is_empty(band), empty);
    ASSERT_EQ(tight == Band{}, empty);
    num_empty += empty;
    if (!empty) expect_tight(tight);
    ASSERT_FALSE(HasFailure()) << draw;
  }
  EXPECT_GT(num_empty, 100);
}

TEST(Band, CountIsTheNumberOfPairs) {
  RandomBands random;
  for (int draw = 0; draw < 4000; ++draw) {
    const Band band = random.band();
    ASSERT_EQ(count_pairs(band), grid_of(band).total()) << draw;
    ASSERT_EQ(count_pairs(tighten(band)), grid_of(band).total()) << draw;
  }
}

TEST(Band, CountOfTheLongestSequence) {
  const int64_t n = int64_t{1} << 31;
  EXPECT_EQ(count_pairs({.q_end = n, .kv_end = n}), int64_t{1} << 62);
  EXPECT_EQ(count_pairs({.q_end = n, .kv_end = n, .hi = 0}), n / 2 * (n + 1));
  EXPECT_EQ(count_pairs({.q_end = n, .kv_end = n, .lo = -kNoDiagonal, .hi = -n}), 0);
  EXPECT_EQ(count_pairs({.q_end = n, .kv_end = n, .lo = n - 1}), 1);
}

TEST(Band, IntersectIsTheCommonPart) {
  RandomBands random;
  for (int draw = 0; draw < 4000; ++draw) {
    const Band a = random.band(), b = random.band(), common = intersect(a, b);
    ASSERT_EQ(grid_of(common),
              PairGrid::of(kSize, kSize, [&](int64_t i, int64_t j) { return in_band(a, i, j) && in_band(b, i, j); }));
    ASSERT_EQ(common, tighten(common));
  }
}

TEST(Band, SubtractGivesAtMostSixDisjointBands) {
  RandomBands random;
  size_t most = 0;
  for (int draw = 0; draw < 4000; ++draw) {
    const Band a = random.band(), b = random.band();
    const std::vector<Band> rest = subtract(a, b);
    most = std::max(most, rest.size());
    ASSERT_EQ(grid_of(rest),
              PairGrid::of(kSize, kSize, [&](int64_t i, int64_t j) { return in_band(a, i, j) && !in_band(b, i, j); }));
    for (const Band& piece : rest) ASSERT_EQ(piece, tighten(piece));
  }
  EXPECT_LE(most, 6u);
  const Band whole{.q_end = 9, .kv_end = 9},
      hole{.q_begin = 2, .q_end = 7, .kv_begin = 2, .kv_end = 7, .lo = -1, .hi = 1};
  EXPECT_EQ(subtract(whole, hole).size(), 6u);
  EXPECT_EQ(subtract(whole, {}), std::vector<Band>{tighten(whole)});
  EXPECT_TRUE(subtract(whole, whole).empty());
}

TEST(Band, UniteGivesUnionsOnly) {
  RandomBands random;
  int num_united = 0;
  for (int draw = 0; draw < 20000; ++draw) {
    const Band a = tighten(random.band()), b = tighten(random.band());
    if (a == Band{} || b == Band{} || intersect(a, b) != Band{}) continue;
    const Band both = unite(a, b);
    if (both == Band{}) continue;
    ++num_united;
    ASSERT_EQ(grid_of(both), grid_of(std::vector<Band>{a, b}));
  }
  EXPECT_GT(num_united, 20);
  EXPECT_EQ(unite({.q_end = 3, .kv_end = 9}, {.q_begin = 3, .q_end = 9, .kv_end = 9}),
            tighten({.q_end = 9, .kv_end = 9}));
  EXPECT_EQ(unite({.q_end = 3, .kv_end = 3}, {.q_begin = 3, .q_end = 9, .kv_begin = 3, .kv_end = 9}), Band{});
}

TEST(Band, MakeDisjointIsTheUnionOnce) {
  RandomBands random;
  for (int draw = 0; draw < 4000; ++draw) {
    std::vector<Band> bands(random.number(0, 5));
    for (Band& band : bands) band = random.band();
    const std::vector<Band> disjoint = make_disjoint(bands);
    ASSERT_EQ(grid_of(disjoint), PairGrid::of(kSize, kSize,
                                              [&](int64_t i, int64_t j) {
                                                for (const Band& band : bands) {
                                                  if (in_band(band, i, j)) return true;
                                                }
                                                return false;
                                              }))
        << draw;
    for (size_t k = 0; k < disjoint.size(); ++k) {
      ASSERT_EQ(disjoint[k], tighten(disjoint[k]));
      ASSERT_NE(disjoint[k], Band{});
      ASSERT_LE(disjoint[k == 0 ? 0 : k - 1].q_begin, disjoint[k].q_begin);
    }
    ASSERT_EQ(make_disjoint(disjoint), disjoint);
  }
}

TEST(Band, MakeDisjointKeepsTheCountSmall) {
  const Band causal{.q_end = 9, .kv_end = 9, .hi = 0};
  EXPECT_EQ(make_disjoint({causal, causal}).size(), 1u);
  EXPECT_EQ(make_disjoint({{.q_begin = 2, .q_end = 5, .kv_end = 2}, causal}).size(), 1u);
  EXPECT_EQ(make_disjoint({{.q_end = 9, .kv_end = 9, .lo = 1}, causal}).size(), 1u);
  EXPECT_EQ(make_disjoint({causal, {.q_end = 9, .kv_end = 4}}).size(), 2u);
  EXPECT_EQ(make_disjoint({{.q_end = 4, .kv_end = 9}, {.q_begin = 4, .q_end = 9, .kv_end = 9}}).size(), 1u);
}

TEST(Band, MakeDisjointOfManyDocumentsIsQuick) {
  std::vector<Band> bands;
  for (int64_t d = 0; d < 10000; ++d) {
    bands.push_back({.q_begin = 7 * d, .q_end = 7 * d + 7, .kv_begin = 7 * d, .kv_end = 7 * d + 7, .lo = -6, .hi = 0});
  }
  EXPECT_EQ(make_disjoint(bands), bands);
}

}  // namespace
}  // namespace ringspan
