#include "ringspan/mask/tile.h"

#include <random>

#include <gtest/gtest.h>

#include "tests/ringspan/mask/pair_grid.h"

namespace ringspan {
namespace {

using testing::PairGrid;

constexpr int64_t kRows = 8;
constexpr int64_t kPositions = 40;

// Marks the kept pairs at their global positions.
PairGrid grid_of(const Tile& tile) {
  PairGrid grid(kPositions, kPositions);
  for (int64_t a = 0; a < tile.q_rows; ++a) {
    for (int64_t c = 0; c < tile.kv_rows; ++c) {
      const int64_t i = tile.q_pos0 + a * tile.q_stride, j = tile.kv_pos0 + c * tile.kv_stride;
      if (j - i >= tile.lo && j - i <= tile.hi) grid.add(i, j);
    }
  }
  return grid;
}

class RandomTiles {
 public:
  int64_t number(int64_t first, int64_t last) { return std::uniform_int_distribution<int64_t>(first, last)(random_); }

  Tile tile() {
    Tile tile{.batch = number(0, 3),
              .q_row0 = number(0, 5),
              .q_rows = number(0, kRows),
              .q_pos0 = number(0, 8),
              .q_stride = number(1, 4),
              .kv_row0 = number(0, 5),
              .kv_rows = number(0, kRows),
              .kv_pos0 = number(0, 8),
              .kv_stride = number(1, 4),
              .lo = -kNoDiagonal,
              .hi = kNoDiagonal};
    if (number(0, 1) == 0) tile.kv_stride = tile.q_stride;
    if (number(0, 3) > 0) tile.lo = number(-20, 20);
    if (number(0, 3) > 0) tile.hi = tile.lo == -kNoDiagonal ? number(-20, 20) : tile.lo + number(-1, 12);
    return tile;
  }

 private:
  std::mt19937_64 random_{20240502};
};

TEST(Tile, KeptColumnsAreOneRangeThatNeverMovesLeft) {
  RandomTiles random;
  for (int draw = 0; draw < 3000; ++draw) {
    const Tile tile = random.tile();
    ColumnRange before{};
    PairGrid grid(kPositions, kPositions);
    for (int64_t a = 0; a < tile.q_rows; ++a) {
      const ColumnRange range = kept_columns(tile, a);
      for (int64_t c = range.begin; c < range.end; ++c) {
        grid.add(tile.q_pos0 + a * tile.q_stride, tile.kv_pos0 + c * tile.kv_stride);
      }
      ASSERT_GE(range.begin, before.begin);
      ASSERT_GE(range.end, before.end);
      ASSERT_LE(range.end, tile.kv_rows);
      before = range;
    }
    ASSERT_EQ(grid, grid_of(tile)) << draw;
  }
}

TEST(Tile, CountIsTheNumberOfPairs) {
  RandomTiles random;
  for (int draw = 0; draw < 5000; ++draw) {
    const Tile tile = random.tile();
    ASSERT_EQ(count_pairs(tile), grid_of(tile).total()) << draw;
  }
}

TEST(Tile, CountOfLongStridedTiles) {
  // Rows 0, 8, 16, ... of 2^30 against all columns, causal: row a keeps 8 a + 1.
  const int64_t rows = int64_t{1} << 27;
  const Tile tile{.q_rows = rows, .q_stride = 8, .kv_rows = 8 * rows, .lo = -kNoDiagonal, .hi = 0};
  EXPECT_EQ(count_pairs(tile), 8 * (rows * (rows - 1) / 2) + rows);
}

TEST(Tile, TightenLeavesNoEmptyEdge) {
  RandomTiles random;
  for (int draw = 0; draw < 5000; ++draw) {
    const Tile tile = random.tile(), tight = tighten(tile);
    ASSERT_EQ(grid_of(tight), grid_of(tile)) << draw;
    ASSERT_EQ(tight.batch, tile.batch);
    if (grid_of(tile).total() == 0) {
      ASSERT_EQ(tight.q_rows, 0);
      ASSERT_EQ(tight.kv_rows, 0);
      continue;
    }
    // The same row still lies where it lay.
    ASSERT_EQ(tight.q_pos0 - tile.q_pos0, (tight.q_row0 - tile.q_row0) * tile.q_stride);
    ASSERT_EQ(tight.kv_pos0 - tile.kv_pos0, (tight.kv_row0 - tile.kv_row0) * tile.kv_stride);
    const auto keeps = [&](int64_t a, int64_t c) {
      const int64_t d = tight.kv_pos0 + c * tight.kv_stride - tight.q_pos0 - a * tight.q_stride;
      return tight.lo <= d && d <= tight.hi;
    };
    bool first_row = false, last_row = false, first_column = false, last_column = false;
    for (int64_t c = 0; c < tight.kv_rows; ++c) {
      first_row |= keeps(0, c);
      last_row |= keeps(tight.q_rows - 1, c);
    }
    for (int64_t a = 0; a < tight.q_rows; ++a) {
      first_column |= keeps(a, 0);
      last_column |= keeps(a, tight.kv_rows - 1);
    }
    ASSERT_TRUE(first_row && last_row && first_column && last_column) << draw;
    ASSERT_EQ(tighten(tight), tight);
  }
}

TEST(Tile, IntersectWithABandIsTheCommonPart) {
  RandomTiles random;
  for (int draw = 0; draw < 5000; ++draw) {
    const Tile tile = random.tile();
    const Band band{.q_begin = random.number(0, 30),
                    .q_end = random.number(0, 40),
                    .kv_begin = random.number(0, 30),
                    .kv_end = random.number(0, 40),
                    .lo = random.number(0, 1) ? random.number(-15, 15) : -kNoDiagonal,
                    .hi = random.number(0, 1) ? random.number(-15, 15) : kNoDiagonal};
    PairGrid expected(kPositions, kPositions);
    for (int64_t a = 0; a < tile.q_rows; ++a) {
      for (int64_t c = 0; c < tile.kv_rows; ++c) {
        const int64_t i = tile.q_pos0 + a * tile.q_stride, j = tile.kv_pos0 + c * tile.kv_stride;
        const bool in_tile = tile.lo <= j - i && j - i <= tile.hi;
        const bool in_rows = band.q_begin <= i && i < band.q_end, in_columns = band.kv_begin <= j && j < band.kv_end;
        if (in_tile && in_rows && in_columns && band.lo <= j - i && j - i <= band.hi) expected.add(i, j);
      }
    }
    ASSERT_EQ(grid_of(intersect(tile, band)), expected) << draw;
  }
}

}  // namespace
}  // namespace ringspan
