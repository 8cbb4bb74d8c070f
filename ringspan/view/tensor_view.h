// Strided views. Whatever the layout, a kernel sees [batch, head, row, dim] with four strides, so no layout is copied.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ringspan/base/dtype.h"
#include "ringspan/shape/problem.h"

namespace ringspan {

// Views do not own; strides are in elements and may be 0 (expanded) in inputs, never in outputs. One that is made by
// default stands for no tensor; one over a tensor is made from its data, and then it is given whatever the pointer is:
// a tensor without elements may have none. Members that are set by hand make no view given (check_made finds it).
template <class Byte>
struct BasicView {
  BasicView() = default;
  BasicView(Byte* data, DType dtype, const std::array<int64_t, 4>& size, const std::array<int64_t, 4>& stride)
      : data(data), dtype(dtype), size(size), stride(stride), is_given_(true) {}

  Byte* data = nullptr;
  DType dtype = DType::kF32;
  std::array<int64_t, 4> size{};    // batch, heads, rows, dim
  std::array<int64_t, 4> stride{};  // elements

  bool is_given() const { return is_given_; }
  int64_t batch() const { return size[0]; }
  int64_t heads() const { return size[1]; }
  int64_t rows() const { return size[2]; }
  int64_t dim() const { return size[3]; }
  int64_t num_elements() const { return size[0] * size[1] * size[2] * size[3]; }
  int64_t offset(int64_t b, int64_t n, int64_t s, int64_t d = 0) const {
    return b * stride[0] + n * stride[1] + s * stride[2] + d * stride[3];
  }
  // First element of a row.
  Byte* row(int64_t b, int64_t n, int64_t s) const { return data + offset(b, n, s) * size_of(dtype); }

  operator BasicView<const Byte>() const
    requires(!std::is_const_v<Byte>)
  {
    BasicView<const Byte> view(data, dtype, size, stride);
    view.is_given_ = is_given_;
    return view;
  }

 private:
  template <class>
  friend struct BasicView;
  bool is_given_ = false;
};
using TensorView = BasicView<std::byte>;
using ConstTensorView = BasicView<const std::byte>;

// [batch, heads, rows, dim] of a dense tensor in `layout`.
TensorView view_of(void* data, DType dtype, Layout layout, std::array<int64_t, 4> size);
ConstTensorView view_of(const void* data, DType dtype, Layout layout, std::array<int64_t, 4> size);

// Statistics [batch, heads, rows] are views whose dim is 1.
TensorView stats_view(void* data, DType dtype, int64_t batch, int64_t heads, int64_t rows);

// Error naming the view unless it is given or stands for nothing, and has data where it has elements.
void check_made(const char* name, const ConstTensorView& view);

// Entries [begin, end) of an axis; a view of no tensor stays one.
template <class Byte>
BasicView<Byte> narrow(BasicView<Byte> view, int axis, int64_t begin, int64_t end) {
  if (!view.is_given()) return view;
  // No pointer, no elements: nothing to point at.
  if (view.data) view.data += begin * view.stride[axis] * size_of(view.dtype);
  view.size[axis] = end - begin;
  return view;
}

// Calls action(b, n, s) for every row.
template <class Byte, class Action>
void for_each_row(const BasicView<Byte>& view, Action&& action) {
  for (int64_t b = 0; b < view.batch(); ++b) {
    for (int64_t n = 0; n < view.heads(); ++n) {
      for (int64_t s = 0; s < view.rows(); ++s) action(b, n, s);
    }
  }
}

// Element by element, converting between dtypes; sizes must agree.
void copy(const ConstTensorView& from, const TensorView& to);
// to += from
void add(const ConstTensorView& from, const TensorView& to);
void fill_zero(const TensorView& to);

}  // namespace ringspan
