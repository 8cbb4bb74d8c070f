// intersect() against the enumeration of all pairs, for the ways in which a sequence can be split.
#include <functional>
#include <random>

#include <gtest/gtest.h>

#include "ringspan/mask/mask_spec.h"
#include "ringspan/mask/tile.h"

#include "tests/ringspan/mask/pair_grid.h"

namespace ringspan {
namespace {

using testing::PairGrid;

std::vector<int64_t> positions_of(const std::vector<Segment>& segments, int64_t rows) {
  std::vector<int64_t> positions(rows, -1);
  for (const Segment& segment : segments) {
    for (int64_t k = 0; k < segment.length; ++k) {
      positions.at(segment.local_row + k) = segment.begin + k * segment.stride;
    }
  }
  return positions;
}

// The pairs that the tiles keep, at their local rows; each tile lies where its positions say.
PairGrid grid_of(const std::vector<Tile>& tiles, const std::vector<int64_t>& q, const std::vector<int64_t>& kv) {
  PairGrid grid(q.size(), kv.size());
  for (const Tile& tile : tiles) {
    int64_t kept = 0;
    for (int64_t a = 0; a < tile.q_rows; ++a) {
      for (int64_t c = 0; c < tile.kv_rows; ++c) {
        const int64_t i = q.at(tile.q_row0 + a), j = kv.at(tile.kv_row0 + c);
        EXPECT_EQ(i, tile.q_pos0 + a * tile.q_stride);
        EXPECT_EQ(j, tile.kv_pos0 + c * tile.kv_stride);
        if (tile.lo <= j - i && j - i <= tile.hi) {
          grid.add(tile.q_row0 + a, tile.kv_row0 + c);
          ++kept;
        }
      }
    }
    EXPECT_GT(kept, 0);
    EXPECT_EQ(kept, count_pairs(tile));
  }
  return grid;
}

void expect_split(const MaskSpec& mask, int64_t batch, const std::vector<Segment>& q, int64_t q_rows,
                  const std::vector<Segment>& kv, int64_t kv_rows) {
  const std::vector<int64_t> q_positions = positions_of(q, q_rows), kv_positions = positions_of(kv, kv_rows);
  const PairGrid expected = PairGrid::of(q_rows, kv_rows, [&](int64_t a, int64_t c) {
    return q_positions[a] >= 0 && kv_positions[c] >= 0 && mask.keeps(batch, q_positions[a], kv_positions[c]);
  });
  const std::vector<Tile> tiles = intersect(mask, batch, q, kv);
  EXPECT_EQ(grid_of(tiles, q_positions, kv_positions), expected);
  for (const Tile& tile : tiles) {
    EXPECT_EQ(tile.batch, batch);
    if (tile.q_rows == 1 || tile.kv_rows == 1) {
      EXPECT_EQ(tile.q_stride, tile.kv_stride);
    }
  }
}

class RandomSplit {
 public:
  int64_t number(int64_t first, int64_t last) { return std::uniform_int_distribution<int64_t>(first, last)(random_); }

  // Deals positions 0..length-1 to two sides in random runs and strides; the rows have gaps and any order.
  std::vector<Segment> segments(int64_t length, int64_t& rows) {
    std::vector<bool> taken(length, false);
    std::vector<Segment> result;
    int64_t row = 0;
    for (int tries = static_cast<int>(number(0, 5)); tries > 0; --tries) {
      Segment segment{.local_row = row,
                      .begin = number(0, std::max<int64_t>(length - 1, 0)),
                      .length = 0,
                      .stride = number(0, 1) ? 1 : number(1, 4)};
      for (int64_t wish = number(1, 7); wish > 0; --wish) {
        const int64_t position = segment.position(segment.length);
        if (position >= length || taken[position]) break;
        taken[position] = true;
        ++segment.length;
      }
      if (segment.length == 0) continue;
      result.push_back(segment);
      row += segment.length + number(0, 2);
    }
    rows = row + number(0, 1);
    return result;
  }

  MaskSpec mask(int64_t q_len, int64_t kv_len) {
    std::vector<Band> bands(number(0, 4));
    for (Band& band : bands) {
      band = {.q_begin = number(0, q_len),
              .q_end = number(0, q_len),
              .kv_begin = number(0, kv_len),
              .kv_end = number(0, kv_len)};
      if (number(0, 1)) band.lo = number(-12, 12);
      if (number(0, 1)) band.hi = number(-12, 12);
    }
    return MaskSpec(q_len, kv_len, {bands});
  }

 private:
  std::mt19937_64 random_{20240506};
};

TEST(Intersect, RandomMasksAndSegments) {
  RandomSplit random;
  for (int draw = 0; draw < 5000; ++draw) {
    const int64_t q_len = random.number(0, 20), kv_len = random.number(0, 20);
    const MaskSpec mask = random.mask(q_len, kv_len);
    int64_t q_rows = 0, kv_rows = 0;
    const std::vector<Segment> q = random.segments(q_len, q_rows), kv = random.segments(kv_len, kv_rows);
    expect_split(mask, 0, q, q_rows, kv, kv_rows);
    ASSERT_FALSE(HasFailure()) << draw;
  }
}

TEST(Intersect, PicksTheListOfTheBatchEntry) {
  const MaskSpec mask = documents_by_lengths(6, {{2, 4}, {6}}, {});
  const std::vector<Segment> all{{.length = 6}};
  EXPECT_EQ(intersect(mask, 0, all, all).size(), 2u);
  EXPECT_EQ(intersect(mask, 1, all, all).size(), 1u);
  for (int64_t batch : {0, 1}) expect_split(mask, batch, all, 6, all, 6);
}

// A hop from a higher-numbered rank has a strict diagonal, from a lower or the same one a diagonal that keeps equals.
TEST(Intersect, StripedCausalIsOneTileWithTheRightDiagonal) {
  const MaskSpec mask = MaskSpec::causal(16, 16, Corner::kTopLeft);
  for (int64_t rank = 0; rank < 4; ++rank) {
    for (int64_t owner = 0; owner < 4; ++owner) {
      const std::vector<Segment> q{{.begin = rank, .length = 4, .stride = 4}};
      const std::vector<Segment> kv{{.begin = owner, .length = 4, .stride = 4}};
      const std::vector<Tile> tiles = intersect(mask, 0, q, kv);
      ASSERT_EQ(tiles.size(), 1u);
      EXPECT_EQ(count_pairs(tiles[0]), owner > rank ? 6 : 10);
      expect_split(mask, 0, q, 4, kv, 4);
    }
  }
}

TEST(Intersect, StridedSegmentsStayWhole) {
  const std::vector<Segment> q{{.length = 1000, .stride = 8}}, kv{{.length = 8000}};
  EXPECT_EQ(intersect(MaskSpec::causal(8000, 8000, Corner::kTopLeft), 0, q, kv).size(), 1u);
  EXPECT_EQ(intersect(MaskSpec::full(8000, 8000), 0, kv, q).size(), 1u);
}

TEST(Intersect, UnitesWhatIsOneTileOnTheseSegments) {
  // A prefix of 4 and causal: two bands, but the rows before the prefix ends see one rectangle.
  const MaskSpec mask = MaskSpec::prefix(8, 8, {4}, Corner::kTopLeft);
  const std::vector<Segment> head{{.length = 4}}, all{{.length = 8}};
  EXPECT_EQ(intersect(mask, 0, head, all).size(), 1u);
  expect_split(mask, 0, all, 8, all, 8);
}

// A row's documents cost a search, not a walk over all of them: 2000 tokens against 2000 documents.
TEST(Intersect, PackedDocumentsGiveOneTileEach) {
  const MaskSpec mask = documents_by_lengths(16000, {std::vector<int64_t>(2000, 8)}, {});
  const std::vector<Segment> q{{.begin = 4000, .length = 1000}}, kv{{.begin = 4004, .length = 1000}};
  const std::vector<Tile> tiles = intersect(mask, 0, q, kv);
  EXPECT_EQ(tiles.size(), 125u);
  int64_t pairs = 0;
  for (const Tile& tile : tiles) pairs += count_pairs(tile);
  EXPECT_EQ(pairs, 10 + 124 * 36);
}

}  // namespace
}  // namespace ringspan
