#include "binding/base/tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "ringspan/base/error.h"

namespace ringspan::binding {
namespace {

std::optional<DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::kF32;
    case at::kBFloat16: return DType::kBF16;
    case at::kHalf: return DType::kF16;
    case at::kDouble: return DType::kF64;
    default: return std::nullopt;
  }
}

template <class View, class Byte>
View view_over(Byte* data, const at::Tensor& tensor) {
  View view(data, *dtype_of(tensor.scalar_type()), {}, {});
  for (int axis = 0; axis < 4; ++axis) {
    view.size[axis] = axis < tensor.dim() ? tensor.size(axis) : 1;
    view.stride[axis] = axis < tensor.dim() ? tensor.stride(axis) : 1;
  }
  return view;
}

}  // namespace

at::ScalarType torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kF32: return at::kFloat;
    case DType::kBF16: return at::kBFloat16;
    case DType::kF16: return at::kHalf;
    case DType::kF64: return at::kDouble;
    case DType::kByte: return at::kByte;
  }
  return at::kFloat;
}

DType core_dtype(const char* name, const at::Tensor& tensor) {
  const std::optional<DType> dtype = dtype_of(tensor.scalar_type());
  RINGSPAN_CHECK(dtype, name, " is ", toString(tensor.scalar_type()),
                 "; it must be float32, bfloat16, float16 or float64");
  return *dtype;
}

Axes axes_of(Layout layout) {
  switch (layout) {
    case Layout::kBNSD: return {0, 1, 2, 4};
    case Layout::kBSND: return {0, 2, 1, 4};
    case Layout::kBSH: return {0, -1, 1, 3};
    case Layout::kSBH: return {1, -1, 0, 3};
    case Layout::kTND: return {-1, 1, 0, 3};
  }
  return {};
}

at::Tensor as_bnsd(const at::Tensor& tensor, Layout layout, int64_t heads) {
  switch (layout) {
    case Layout::kBNSD: return tensor;
    case Layout::kBSND: return tensor.transpose(1, 2);
    case Layout::kBSH: return tensor.unflatten(2, {heads, tensor.size(2) / heads}).transpose(1, 2);
    case Layout::kSBH: return tensor.unflatten(2, {heads, tensor.size(2) / heads}).permute({1, 2, 0, 3});
    case Layout::kTND: return tensor.unsqueeze(0).transpose(1, 2);
  }
  return tensor;
}

std::vector<int64_t> shape_in(Layout layout, int64_t batch, int64_t heads, int64_t rows, int64_t dim) {
  switch (layout) {
    case Layout::kBNSD: return {batch, heads, rows, dim};
    case Layout::kBSND: return {batch, rows, heads, dim};
    case Layout::kBSH: return {batch, rows, heads * dim};
    case Layout::kSBH: return {rows, batch, heads * dim};
    case Layout::kTND: return {rows, heads, dim};
  }
  return {};
}

ConstTensorView const_view(const at::Tensor& bnsd) {
  return view_over<ConstTensorView>(static_cast<const std::byte*>(bnsd.const_data_ptr()), bnsd);
}

TensorView mutable_view(const at::Tensor& bnsd) {
  return view_over<TensorView>(static_cast<std::byte*>(bnsd.mutable_data_ptr()), bnsd);
}

bool wants_gradient(const std::optional<at::Tensor>& tensor) {
  return at::GradMode::is_enabled() && tensor && tensor->requires_grad();
}

at::Tensor empty_dense(const at::Tensor& tensor) { return at::empty_symint(tensor.sym_sizes(), tensor.options()); }

}  // namespace ringspan::binding
