// Tensor: an owned tensor of the product's dtypes in a layout of choice, filled from and read back into an Array.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ringspan/base/dtype.h"
#include "ringspan/shape/problem.h"
#include "ringspan/view/tensor_view.h"

#include "tests/ringspan/support/array.h"

namespace ringspan::test {

class Tensor {
 public:
  Tensor() = default;
  // Dense in memory with the dimensions in `order` (0 batch, 1 head, 2 row, 3 dim; the last one is innermost), and
  // the innermost stride `gap`. What no view element covers holds `filler`.
  Tensor(DType dtype, std::array<int64_t, 4> size, std::array<int, 4> order = {0, 1, 2, 3}, int64_t gap = 1,
         double filler = 0);
  Tensor(const Array& values, DType dtype, std::array<int, 4> order = {0, 1, 2, 3}, int64_t gap = 1);

  // Of a default tensor, no tensor.
  TensorView view() { return is_given_ ? TensorView{storage_.data(), dtype_, size_, stride_} : TensorView{}; }
  ConstTensorView view() const {
    return is_given_ ? ConstTensorView{storage_.data(), dtype_, size_, stride_} : ConstTensorView{};
  }
  Array array() const { return to_array(view()); }
  const std::vector<std::byte>& bytes() const { return storage_; }

  static Array to_array(const ConstTensorView& view);

 private:
  DType dtype_ = DType::kF32;
  std::array<int64_t, 4> size_{};
  std::array<int64_t, 4> stride_{};
  std::vector<std::byte> storage_;
  bool is_given_ = false;
};

// The order of dimensions of each layout.
std::array<int, 4> order_of(Layout layout);

}  // namespace ringspan::test
