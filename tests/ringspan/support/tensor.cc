#include "tests/ringspan/support/tensor.h"

#include <stdexcept>

namespace ringspan::test {

Tensor::Tensor(DType dtype, std::array<int64_t, 4> size, std::array<int, 4> order, int64_t gap, double filler)
    : dtype_(dtype), size_(size), is_given_(true) {
  int64_t num_elements = gap;
  for (int place = 3; place >= 0; --place) {
    stride_[static_cast<std::size_t>(order[static_cast<std::size_t>(place)])] = num_elements;
    num_elements *= size[static_cast<std::size_t>(order[static_cast<std::size_t>(place)])];
  }
  storage_.resize(static_cast<std::size_t>(num_elements * size_of(dtype)));
  for (int64_t i = 0; i < num_elements; ++i) store_from_double(storage_.data(), dtype, i, filler);
}

Tensor::Tensor(const Array& values, DType dtype, std::array<int, 4> order, int64_t gap)
    : Tensor(dtype, values.size, order, gap) {
  const TensorView to = view();
  for_each_index(size_, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
    store_from_double(to.data, dtype_, to.offset(b, n, s, d), values.at(b, n, s, d));
  });
}

Array Tensor::to_array(const ConstTensorView& view) {
  Array array(view.size);
  for_each_index(view.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
    array.at(b, n, s, d) = load_as_double(view.data, view.dtype, view.offset(b, n, s, d));
  });
  return array;
}

std::array<int, 4> order_of(Layout layout) {
  switch (layout) {
    case Layout::kBNSD: return {0, 1, 2, 3};
    case Layout::kBSND:
    case Layout::kTND:
    case Layout::kBSH: return {0, 2, 1, 3};
    case Layout::kSBH: return {2, 0, 1, 3};
  }
  throw std::logic_error("unknown layout");
}

}  // namespace ringspan::test
