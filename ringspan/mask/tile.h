// Tile: one piece of work for a kernel. Local rows say where the data lies, global positions say what is kept.
// Row a (0 <= a < q_rows) and column c (0 <= c < kv_rows) are kept where
//     lo <= (kv_pos0 + c * kv_stride) - (q_pos0 + a * q_stride) <= hi,
// so each row keeps one range of columns, and both ends of that range never move left from row to row.
#pragma once

#include <cstdint>

#include "ringspan/mask/band.h"

namespace ringspan {

struct Tile {
  int64_t batch = 0;
  int64_t q_row0 = 0, q_rows = 0, q_pos0 = 0, q_stride = 1;
  int64_t kv_row0 = 0, kv_rows = 0, kv_pos0 = 0, kv_stride = 1;
  int64_t lo = 0, hi = 0;

  bool operator==(const Tile&) const = default;
};

// Columns [begin, end) of the tile that row `row` keeps; begin >= end where it keeps none.
struct ColumnRange {
  int64_t begin = 0, end = 0;
};
ColumnRange kept_columns(const Tile& tile, int64_t row);

// Number of kept pairs, in closed form.
int64_t count_pairs(const Tile& tile);

// The same pairs without the rows and columns at the edges that keep nothing, and with the tightest diagonals that
// equal strides allow; a tile that keeps nothing gets no rows and no columns.
Tile tighten(const Tile& tile);
// The pairs of `tile` that `band` keeps too, tightened.
Tile intersect(const Tile& tile, const Band& band);

}  // namespace ringspan
