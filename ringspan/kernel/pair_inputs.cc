#include "ringspan/kernel/pair_inputs.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ringspan/base/error.h"

namespace ringspan::kernel {
namespace {

void check_axes(const char* name, const std::array<int64_t, 4>& size, const ConstTensorView& q, int64_t rows) {
  RINGSPAN_CHECK(size[0] == q.batch() && size[1] == q.heads() && size[2] == rows, name, " has size [", size[0], ", ",
                 size[1], ", ", size[2], ", ", size[3], "], expected [", q.batch(), ", ", q.heads(), ", ", rows,
                 ", ...]");
}

// Where the rows and columns of a tile lie, first and last.
struct Reach {
  int64_t q_first, q_last, kv_first, kv_last;
};

Reach reach_of(const Tile& tile) {
  return {tile.q_pos0, tile.q_pos0 + (tile.q_rows - 1) * tile.q_stride, tile.kv_pos0,
          tile.kv_pos0 + (tile.kv_rows - 1) * tile.kv_stride};
}

void check_columns(const char* name, int64_t columns, const Reach& reach) {
  RINGSPAN_CHECK(0 <= reach.kv_first && reach.kv_last < columns, name, " has ", columns,
                 " columns and a tile keeps keys at positions ", reach.kv_first, " to ", reach.kv_last);
}

const PairGrid& grid_at(std::span<const PairGrid> grids, int64_t q_pos) {
  const auto next = std::upper_bound(grids.begin(), grids.end(), q_pos,
                                     [](int64_t at, const PairGrid& grid) { return at < grid.q_begin; });
  RINGSPAN_CHECK(next != grids.begin(), "no grid holds query position ", q_pos);
  return *(next - 1);
}

// A tile may reach over several grids; each of its rows lies in one.
void check_mask_of_grids(const PairInputs& pairs, const Tile& tile) {
  for (int64_t row = 0; row < tile.q_rows; ++row) {
    const ColumnRange columns = kept_columns(tile, row);
    if (columns.begin >= columns.end) continue;
    const int64_t q_pos = tile.q_pos0 + row * tile.q_stride;
    const PairGrid& grid = grid_at(pairs.grids, q_pos);
    const int64_t i = q_pos - grid.q_begin, first = tile.kv_pos0 + columns.begin * tile.kv_stride - grid.kv_begin,
                  last = tile.kv_pos0 + (columns.end - 1) * tile.kv_stride - grid.kv_begin;
    RINGSPAN_CHECK(i < pairs.mask.size[2] && 0 <= first && last < pairs.mask.size[3], "mask has ", pairs.mask.size[2],
                   " rows and ", pairs.mask.size[3], " columns, and row ", i, " of a grid keeps columns ", first,
                   " to ", last);
  }
}

}  // namespace

void check_numbers(const PairInputs& pairs, DType acc) {
  for (const auto& [name, member] : kPairNumbers) {
    const double value = pairs.numbers.*member;
    RINGSPAN_CHECK(std::isfinite(value) && value >= 0, name, " is ", value,
                   ", expected a positive number, or 0 for none");
    // Kernels multiply with both, in this type.
    const double inverse = acc == DType::kF64 ? 1 / value : 1 / static_cast<float>(value);
    RINGSPAN_CHECK(is_finite_as(acc, value), name, " is ", value, ", which is infinite in ", name_of(acc));
    RINGSPAN_CHECK(value == 0 || std::isfinite(inverse), name, " is ", value, ", and 1 / ", name, ", ", 1 / value,
                   ", is infinite in ", name_of(acc));
  }
  RINGSPAN_CHECK(pairs.dropout.p >= 0 && pairs.dropout.p < 1, "the dropout probability is ", pairs.dropout.p,
                 ", expected at least 0 and below 1");
  for (const auto& [name, view] :
       {std::pair("bias", pairs.bias), std::pair("mask", pairs.mask.bytes()), std::pair("slopes", pairs.slopes)}) {
    check_made(name, view);
  }
  if (pairs.bias.is_given()) {
    RINGSPAN_CHECK(acc == DType::kF64 ? size_of(pairs.bias.dtype) >= 4 : pairs.bias.dtype != DType::kF64, "bias is ",
                   name_of(pairs.bias.dtype), ", which does not widen to ", name_of(acc));
    RINGSPAN_CHECK(is_finite_as(acc, pairs.bias_factor), "bias_factor is ", pairs.bias_factor,
                   ", which is not finite in ", name_of(acc));
  }
  RINGSPAN_CHECK(!pairs.slopes.is_given() || pairs.slopes.dtype == acc, "slopes are ", name_of(pairs.slopes.dtype),
                 ", expected ", name_of(acc));
}

void check_pairs(const PairInputs& pairs, const ConstTensorView& q, std::span<const Tile> tiles) {
  check_numbers(pairs, accumulator_of(q.dtype));
  if (!pairs.changes_scores() && !pairs.drops()) return;
  const bool by_grid = pairs.mask.is_given() && pairs.mask.rows_are_grids;
  if (pairs.bias.is_given()) check_axes("bias", pairs.bias.size, q, q.rows());
  if (pairs.mask.is_given()) check_axes("mask", pairs.mask.size, q, by_grid ? pairs.mask.size[2] : q.rows());
  if (pairs.slopes.is_given()) check_axes("slopes", pairs.slopes.size, q, 1);
  const bool needs_grids = pairs.drops() || pairs.slopes.is_given() || by_grid;
  for (const Tile& tile : tiles) {
    if (tile.q_rows <= 0 || tile.kv_rows <= 0) continue;
    const Reach reach = reach_of(tile);
    if (pairs.bias.is_given()) check_columns("bias", pairs.bias.size[3], reach);
    if (pairs.mask.is_given() && !by_grid) check_columns("mask", pairs.mask.size[3], reach);
    if (needs_grids) grid_at(pairs.grids, reach.q_first);
    if (by_grid) check_mask_of_grids(pairs, tile);
  }
}

}  // namespace ringspan::kernel
