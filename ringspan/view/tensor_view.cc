#include "ringspan/view/tensor_view.h"

#include <cstring>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

// Strides of a dense [batch, heads, rows, dim] tensor whose memory order is `layout`.
std::array<int64_t, 4> dense_strides(Layout layout, const std::array<int64_t, 4>& size) {
  const auto [batch, heads, rows, dim] = size;
  switch (layout) {
    case Layout::kBNSD: return {heads * rows * dim, rows * dim, dim, 1};
    case Layout::kBSND:
    case Layout::kTND:
    case Layout::kBSH: return {rows * heads * dim, dim, heads * dim, 1};
    case Layout::kSBH: return {heads * dim, dim, batch * heads * dim, 1};
  }
  return {};
}

void check_same_size(const ConstTensorView& from, const ConstTensorView& to) {
  for (int axis = 0; axis < 4; ++axis) {
    RINGSPAN_CHECK(from.size[axis] == to.size[axis], "views differ on axis ", axis, ": ", from.size[axis], " and ",
                   to.size[axis]);
  }
}

// Gradients leave fp32 here, once per call.
template <uint16_t (*kRound)(float)>
void round_row(const std::byte* from, std::byte* to, int64_t dim) {
  const auto* source = reinterpret_cast<const float*>(from);
  auto* target = reinterpret_cast<uint16_t*>(to);
  for (int64_t d = 0; d < dim; ++d) target[d] = kRound(source[d]);
}

template <class T>
void add_row(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride, int64_t dim) {
  const T* source = reinterpret_cast<const T*>(from);
  T* target = reinterpret_cast<T*>(to);
  for (int64_t d = 0; d < dim; ++d) target[d * to_stride] += source[d * from_stride];
}

}  // namespace

TensorView view_of(void* data, DType dtype, Layout layout, std::array<int64_t, 4> size) {
  return {static_cast<std::byte*>(data), dtype, size, dense_strides(layout, size)};
}

ConstTensorView view_of(const void* data, DType dtype, Layout layout, std::array<int64_t, 4> size) {
  return {static_cast<const std::byte*>(data), dtype, size, dense_strides(layout, size)};
}

TensorView stats_view(void* data, DType dtype, int64_t batch, int64_t heads, int64_t rows) {
  return view_of(data, dtype, Layout::kBNSD, {batch, heads, rows, 1});
}

void check_made(const char* name, const ConstTensorView& view) {
  const bool is_empty = view.data == nullptr && view.size == std::array<int64_t, 4>{};
  RINGSPAN_CHECK(view.is_given() || is_empty, name, " has ", view.data == nullptr ? "sizes" : "data",
                 " and is not given; make the view from the tensor's data, type, size and stride");
  RINGSPAN_CHECK(view.data != nullptr || view.num_elements() == 0, name, " has ", view.num_elements(),
                 " elements and no data");
}

void copy(const ConstTensorView& from, const TensorView& to) {
  check_same_size(from, to);
  const bool dense_rows = from.stride[3] == 1 && to.stride[3] == 1;
  for_each_row(from, [&](int64_t b, int64_t n, int64_t s) {
    const std::byte* source = from.row(b, n, s);
    std::byte* target = to.row(b, n, s);
    if (dense_rows && from.dtype == to.dtype) {
      std::memcpy(target, source, static_cast<size_t>(from.dim() * size_of(from.dtype)));
    } else if (dense_rows && from.dtype == DType::kF32 && to.dtype == DType::kBF16) {
      round_row<float_to_bf16>(source, target, from.dim());
    } else if (dense_rows && from.dtype == DType::kF32 && to.dtype == DType::kF16) {
      round_row<float_to_fp16>(source, target, from.dim());
    } else {
      for (int64_t d = 0; d < from.dim(); ++d) {
        store_from_double(target, to.dtype, d * to.stride[3], load_as_double(source, from.dtype, d * from.stride[3]));
      }
    }
  });
}

void add(const ConstTensorView& from, const TensorView& to) {
  check_same_size(from, to);
  RINGSPAN_CHECK(from.dtype == to.dtype && from.dtype == accumulator_of(from.dtype),
                 "sums are kept in fp32 or fp64, not ", name_of(from.dtype), " into ", name_of(to.dtype));
  for_each_row(from, [&](int64_t b, int64_t n, int64_t s) {
    const auto add_one = from.dtype == DType::kF64 ? add_row<double> : add_row<float>;
    add_one(from.row(b, n, s), from.stride[3], to.row(b, n, s), to.stride[3], from.dim());
  });
}

void fill_zero(const TensorView& to) {
  for_each_row(to, [&](int64_t b, int64_t n, int64_t s) {
    std::byte* target = to.row(b, n, s);
    for (int64_t d = 0; d < to.dim(); ++d) store_from_double(target, to.dtype, d * to.stride[3], 0.0);
  });
}

}  // namespace ringspan
