// PairInputs: what changes single pairs beside q.k. For query row i and key row j of one head
//
//     s_ij  = cap tanh(scale q_i.k_j / cap) + bias_factor bias_ij - slope f(|distance_ij + shift|)
//             -inf where bias_ij is -inf or the mask says so: the pair then takes no part
//     out_i = sum_j M_ij P_ij v_j / (1 - p)      P = softmax_j(s), M_ij = 1 where the pair's draw is kept (dropout)
//
// max, sum and lse are those of s: dropout leaves them as they are.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "ringspan/kernel/pair_grid.h"
#include "ringspan/kernel/pair_numbers.h"
#include "ringspan/mask/tile.h"
#include "ringspan/view/tensor_view.h"

namespace ringspan {

// A mask of bytes, [batch, heads, rows, columns] with strides in bytes (0 = the same for all of an axis). Given or not
// as a BasicView is.
struct ByteMaskView {
  ByteMaskView() = default;
  ByteMaskView(const std::byte* data, const std::array<int64_t, 4>& size, const std::array<int64_t, 4>& stride,
               bool masked_value = false, bool rows_are_grids = false)
      : data(data),
        size(size),
        stride(stride),
        masked_value(masked_value),
        rows_are_grids(rows_are_grids),
        is_given_(true) {}

  const std::byte* data = nullptr;
  std::array<int64_t, 4> size{}, stride{};
  bool masked_value = false;    // the truth value of a byte that masks its pair out
  bool rows_are_grids = false;  // rows and columns count from the pair's grid instead of local row and global column

  bool is_given() const { return is_given_; }
  // The bytes as a tensor; none where the mask is not given.
  ConstTensorView bytes() const {
    ConstTensorView view = is_given_ ? ConstTensorView(data, DType::kByte, size, stride) : ConstTensorView();
    view.data = data;
    view.size = size;
    return view;
  }

 private:
  bool is_given_ = false;
};

struct Dropout {
  double p = 0;  // probability that a pair is dropped, in [0, 1); 0 = none
  uint64_t seed = 0, offset = 0;
};

struct PairInputs {
  PairNumbers numbers{};
  // [B, N, rows, columns]: rows are the local ones, columns global positions; strides may be 0. Any dtype that widens
  // to the accumulator type of the call. As of the mask: where all rows share one (stride 0 over rows), the pointer is
  // that row's also where there are no local rows, for these may meet other ranks' rows.
  ConstTensorView bias{};
  double bias_factor = 1;
  ByteMaskView mask{};
  // [B, N, 1, 1] in the accumulator type.
  ConstTensorView slopes{};
  int64_t slope_shift = 0;
  bool slope_of_root = false;  // f is the square root instead of the identity
  Dropout dropout{};
  // Sorted by q_begin, the first at or before every position; a row keeps pairs of its own grid only. Needed for
  // dropout, slopes and masks by grid.
  std::span<const PairGrid> grids{};

  bool has_numbers() const {
    return std::ranges::any_of(kPairNumbers, [this](const PairNumberInfo& info) { return numbers.*info.value != 0; });
  }
  bool changes_scores() const { return has_numbers() || bias.is_given() || mask.is_given() || slopes.is_given(); }
  bool drops() const { return dropout.p != 0; }
};

namespace kernel {

// Error where a number is out of its range or infinite in the accumulator type `acc`, or a tensor has no data or a
// dtype that does not go with it. Reads no tile.
void check_numbers(const PairInputs& pairs, DType acc);

// check_numbers, and Error where an input does not reach every pair of the tiles. Cost: one look at each
// tile, at each row for a mask by grid, and only where something is given.
void check_pairs(const PairInputs& pairs, const ConstTensorView& q, std::span<const Tile> tiles);

}  // namespace kernel
}  // namespace ringspan
