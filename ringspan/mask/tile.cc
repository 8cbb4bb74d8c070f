#include "ringspan/mask/tile.h"

#include <algorithm>

#include "ringspan/shape/division.h"

namespace ringspan {
namespace {

int64_t q_position(const Tile& tile, int64_t row) { return tile.q_pos0 + row * tile.q_stride; }
int64_t kv_position(const Tile& tile, int64_t column) { return tile.kv_pos0 + column * tile.kv_stride; }

Tile empty_like(const Tile& tile) {
  Tile empty;
  empty.batch = tile.batch;
  return empty;
}

// Cuts the tile down to some of its rows and columns.
Tile cut(Tile tile, int64_t row_begin, int64_t row_end, int64_t column_begin, int64_t column_end) {
  tile.q_pos0 = q_position(tile, row_begin);
  tile.q_row0 += row_begin;
  tile.q_rows = row_end - row_begin;
  tile.kv_pos0 = kv_position(tile, column_begin);
  tile.kv_row0 += column_begin;
  tile.kv_rows = column_end - column_begin;
  return tile;
}

// Pairs with kv position - q position <= limit. Row a keeps the columns below f(a) = floor((c + a * q_stride) /
// kv_stride), cut to 0 .. kv_rows; f never falls, so the rows are three runs: none, some, all of the columns.
int64_t count_below(const Tile& tile, int64_t limit) {
  const int64_t base = tile.q_pos0 + limit - tile.kv_pos0 + tile.kv_stride;
  const auto first_row = [&](int64_t columns) {  // the first row that keeps at least `columns`
    return std::clamp<int64_t>(ceil_div(columns * tile.kv_stride - base, tile.q_stride), 0, tile.q_rows);
  };
  const int64_t some = first_row(1), all = first_row(tile.kv_rows);
  int64_t total = (tile.q_rows - all) * tile.kv_rows;
  if (all > some) total += sum_of_floors(all - some, base + some * tile.q_stride, tile.q_stride, tile.kv_stride);
  return total;
}

// With one stride for rows and columns the tile is a band of row and column numbers.
Tile tighten_lattice(const Tile& tile, int64_t stride) {
  const int64_t corner = tile.kv_pos0 - tile.q_pos0;
  const Band band = tighten(Band{.q_begin = 0,
                                 .q_end = tile.q_rows,
                                 .kv_begin = 0,
                                 .kv_end = tile.kv_rows,
                                 .lo = ceil_div(tile.lo - corner, stride),
                                 .hi = floor_div(tile.hi - corner, stride)});
  if (band == Band{}) return empty_like(tile);
  Tile result = cut(tile, band.q_begin, band.q_end, band.kv_begin, band.kv_end);
  result.lo = corner + band.lo * stride;
  result.hi = corner + band.hi * stride;
  return result;
}

}  // namespace

ColumnRange kept_columns(const Tile& tile, int64_t row) {
  const int64_t offset = q_position(tile, row) - tile.kv_pos0;
  return {.begin = std::clamp<int64_t>(ceil_div(offset + tile.lo, tile.kv_stride), 0, tile.kv_rows),
          .end = std::clamp<int64_t>(floor_div(offset + tile.hi, tile.kv_stride) + 1, 0, tile.kv_rows)};
}

int64_t count_pairs(const Tile& tile) {
  if (tile.q_rows <= 0 || tile.kv_rows <= 0 || tile.lo > tile.hi) return 0;
  return count_below(tile, tile.hi) - count_below(tile, tile.lo - 1);
}

Tile tighten(const Tile& tile) {
  if (tile.q_rows <= 0 || tile.kv_rows <= 0 || tile.lo > tile.hi) return empty_like(tile);
  if (tile.q_rows == 1) return tighten_lattice(tile, tile.kv_stride);
  if (tile.kv_rows == 1 || tile.q_stride == tile.kv_stride) return tighten_lattice(tile, tile.q_stride);

  // Unequal strides: a row between two that keep something may keep nothing, so the edge rows are searched from where
  // the diagonals cross the first and the last column.
  const int64_t kv_last = kv_position(tile, tile.kv_rows - 1);
  int64_t first = std::max<int64_t>(0, ceil_div(tile.kv_pos0 - tile.hi - tile.q_pos0, tile.q_stride));
  int64_t last = std::min<int64_t>(tile.q_rows - 1, floor_div(kv_last - tile.lo - tile.q_pos0, tile.q_stride));
  const auto keeps_nothing = [&](int64_t row) {
    const ColumnRange columns = kept_columns(tile, row);
    return columns.begin >= columns.end;
  };
  while (first <= last && keeps_nothing(first)) ++first;
  while (first <= last && keeps_nothing(last)) --last;
  if (first > last) return empty_like(tile);
  Tile result = cut(tile, first, last + 1, kept_columns(tile, first).begin, kept_columns(tile, last).end);
  result.lo = std::max(tile.lo, result.kv_pos0 - q_position(result, result.q_rows - 1));
  result.hi = std::min(tile.hi, kv_position(result, result.kv_rows - 1) - result.q_pos0);
  return result.q_rows == 1 || result.kv_rows == 1 ? tighten(result) : result;
}

Tile intersect(const Tile& tile, const Band& band) {
  const auto first_at = [](int64_t position, int64_t pos0, int64_t stride, int64_t rows) {
    return std::clamp<int64_t>(ceil_div(position - pos0, stride), 0, rows);
  };
  const int64_t row_begin = first_at(band.q_begin, tile.q_pos0, tile.q_stride, tile.q_rows);
  const int64_t row_end = first_at(band.q_end, tile.q_pos0, tile.q_stride, tile.q_rows);
  const int64_t column_begin = first_at(band.kv_begin, tile.kv_pos0, tile.kv_stride, tile.kv_rows);
  const int64_t column_end = first_at(band.kv_end, tile.kv_pos0, tile.kv_stride, tile.kv_rows);
  if (row_begin >= row_end || column_begin >= column_end) return empty_like(tile);
  Tile result = cut(tile, row_begin, row_end, column_begin, column_end);
  result.lo = std::max(tile.lo, band.lo);
  result.hi = std::min(tile.hi, band.hi);
  return tighten(result);
}

}  // namespace ringspan
