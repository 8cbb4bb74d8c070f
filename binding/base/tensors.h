// Between at::Tensor and the core's types: dtypes, layouts, views. Nothing is copied.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ringspan/base/dtype.h"
#include "ringspan/view/tensor_view.h"

namespace ringspan::binding {

at::ScalarType torch_dtype(DType dtype);
// Error naming the argument where its dtype is not offered.
DType core_dtype(const char* name, const at::Tensor& tensor);

// Where the axes of an activation lie; -1 = it has none (TND: no batch; BSH, SBH: heads and head dim share the last).
struct Axes {
  int64_t batch, head, row, dims;
};
Axes axes_of(Layout layout);

// Shape of a [batch, heads, rows, dim] activation in `layout`.
std::vector<int64_t> shape_in(Layout layout, int64_t batch, int64_t heads, int64_t rows, int64_t dim);
// The [batch, heads, rows, dim] view of a tensor in `layout`.
at::Tensor as_bnsd(const at::Tensor& tensor, Layout layout, int64_t heads);

// Over the memory of a [batch, heads, rows, dim] tensor, or of statistics [batch, heads, rows].
ConstTensorView const_view(const at::Tensor& tensor);
TensorView mutable_view(const at::Tensor& tensor);

// Whether autograd records what is computed of it.
bool wants_gradient(const std::optional<at::Tensor>& tensor);

// Dense, uninitialised, of the size, dtype and device of `tensor`, which may be a traced one.
at::Tensor empty_dense(const at::Tensor& tensor);

}  // namespace ringspan::binding
