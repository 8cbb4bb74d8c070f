#include "binding/op/pair_arguments.h"

#include <cmath>

#include <ATen/ATen.h>

#include "ringspan/base/error.h"

#include "binding/base/tensors.h"

namespace ringspan::binding {
namespace {

void check_pairs(const char* name, const at::Tensor& tensor, const std::vector<int64_t>& full) {
  RINGSPAN_CHECK(tensor.device().is_cpu(), name, " lies on ", tensor.device().str(), "; move it to the CPU");
  const auto dims = static_cast<size_t>(tensor.dim());
  bool fits = 1 <= dims && dims <= full.size();
  for (size_t i = 0; fits && i < dims; ++i) {
    const int64_t size = tensor.size(static_cast<int64_t>(i)), want = full[full.size() - dims + i];
    // Columns are never shared: the gradient of one that is would be summed over key blocks.
    fits = size == want || (size == 1 && i + 1 < dims);
  }
  RINGSPAN_CHECK(fits, name, " has shape ", tensor.sizes(), "; it must expand to ", at::IntArrayRef(full),
                 " (batch, query heads, this rank's query rows, all key positions)");
}

// Size along an axis counted from the last one, which is 1; 1 where the tensor has none.
int64_t size_from_end(const at::Tensor& tensor, int64_t axis) { return tensor.dim() >= axis ? tensor.size(-axis) : 1; }

// `view` with the sizes of `full` over the memory of the tensor as it was given: a tensor that is expanded to no rows
// has no address, and a row that all queries share is read on ranks that hold none.
template <class View>
View expanded_view(View view, const at::Tensor& tensor, const std::vector<int64_t>& full) {
  const at::Tensor expanded = tensor.expand(full);
  for (int axis = 0; axis < 4; ++axis) {
    view.size[axis] = full[axis];
    view.stride[axis] = expanded.stride(axis);
  }
  // One row for all queries has stride 0 whatever the tensor says, and rows of their own have another, also where there
  // are none.
  if (size_from_end(tensor, 2) == 1) view.stride[2] = 0;
  if (size_from_end(tensor, 2) == 0) view.stride[2] = 1;
  return view;
}

at::Tensor dense_slopes(const at::Tensor& slopes, const Problem& p, at::ScalarType accumulator) {
  RINGSPAN_CHECK(slopes.device().is_cpu(), "slopes lie on ", slopes.device().str(), "; move them to the CPU");
  const bool shared = slopes.dim() == 1 && slopes.size(0) == p.q_heads;
  const bool by_batch = slopes.dim() == 2 && slopes.size(0) == p.batch && slopes.size(1) == p.q_heads;
  RINGSPAN_CHECK(shared || by_batch, "slopes have shape ", slopes.sizes(), "; give [", p.q_heads, "] or [", p.batch,
                 ", ", p.q_heads, "], one for each query head");
  return slopes.to(accumulator).expand({p.batch, p.q_heads}).unsqueeze(-1).unsqueeze(-1);
}

void check_places(const PairArguments& arguments, const Problem& p) {
  const double dropout_p = arguments.inputs.dropout.p;
  RINGSPAN_CHECK(dropout_p >= 0 && dropout_p < 1, "dropout_p is ", dropout_p, "; it must be at least 0 and below 1");
  for (const auto& [name, value] :
       {std::pair("offset", arguments.offset), std::pair("batch_offset", arguments.batch_offset),
        std::pair("head_offset", arguments.head_offset)}) {
    RINGSPAN_CHECK(value >= 0, name, " is ", value, "; it must be at least 0");
  }
  if (dropout_p == 0) return;
  RINGSPAN_CHECK(arguments.total_heads - p.q_heads >= arguments.head_offset, "total_heads is ", arguments.total_heads,
                 ", and this call has ", p.q_heads, " heads from head_offset ", arguments.head_offset,
                 " on; it must count the heads of the undivided call");
}

// The whole call's order, [B, N, Sq, Skv].
PairGrid grid_of(const PairArguments& arguments, const Problem& p) {
  PairGrid grid{};
  grid.row_stride = static_cast<uint64_t>(p.kv_len);
  grid.head_stride = static_cast<uint64_t>(p.q_len) * grid.row_stride;
  grid.batch_stride = static_cast<uint64_t>(arguments.total_heads) * grid.head_stride;
  grid.origin = static_cast<uint64_t>(arguments.batch_offset) * grid.batch_stride +
                static_cast<uint64_t>(arguments.head_offset) * grid.head_stride;
  return grid;
}

}  // namespace

RowReading reading_of(const at::Tensor& tensor, int64_t q_rows) {
  if (size_from_end(tensor, 2) != 1) return RowReading::kByRows;
  return q_rows == 1 ? RowReading::kEither : RowReading::kShared;
}

int64_t batch_of_pairs(const at::Tensor& tensor) { return size_from_end(tensor, 4); }
int64_t heads_of_pairs(const at::Tensor& tensor) { return size_from_end(tensor, 3); }

PairOperands::PairOperands(const PairArguments& arguments, const Problem& p, int64_t q_rows)
    : numbers_(arguments.inputs),
      bias_(arguments.bias),
      mask_(arguments.mask),
      mask_means_masked_(arguments.mask_means_masked),
      mask_by_grid_(arguments.mask_by_grid),
      accumulator_(torch_dtype(accumulator_of(p.dtype))),
      full_({p.batch, p.q_heads, q_rows, p.kv_len}),
      full_mask_(full_),
      grids_(arguments.grids) {
  check_places(arguments, p);
  numbers_.dropout.offset = static_cast<uint64_t>(arguments.offset);
  if (bias_) check_pairs("bias", *bias_, full_);
  if (mask_) {
    if (mask_by_grid_) full_mask_ = {p.batch, p.q_heads, mask_->size(-2), mask_->size(-1)};
    check_pairs("attn_mask", *mask_, full_mask_);
  }
  if (arguments.slopes) slopes_ = dense_slopes(*arguments.slopes, p, accumulator_);
  if (grids_.empty()) grids_ = {grid_of(arguments, p)};
  kernel::check_numbers(inputs(0), accumulator_of(p.dtype));
}

PairInputs PairOperands::inputs(int64_t seed) const {
  PairInputs inputs = numbers_;
  if (bias_) {
    const ConstTensorView view(static_cast<const std::byte*>(bias_->const_data_ptr()), core_dtype("bias", *bias_), {},
                               {});
    inputs.bias = expanded_view(view, *bias_, full_);
  }
  if (mask_) {
    const ByteMaskView view(static_cast<const std::byte*>(mask_->const_data_ptr()), {}, {}, mask_means_masked_,
                            mask_by_grid_);
    inputs.mask = expanded_view(view, *mask_, full_mask_);
  }
  if (slopes_.defined()) inputs.slopes = const_view(slopes_);
  inputs.dropout.seed = static_cast<uint64_t>(seed);
  inputs.grids = grids_;
  return inputs;
}

at::Tensor PairOperands::make_bias_gradient() const {
  return at::zeros(bias_->sizes(), bias_->options().dtype(accumulator_));
}

TensorView PairOperands::bias_gradient_view(const at::Tensor& gradient) const {
  const TensorView view(static_cast<std::byte*>(gradient.mutable_data_ptr()),
                        core_dtype("the gradient of bias", gradient), {}, {});
  return expanded_view(view, gradient, full_);
}

}  // namespace ringspan::binding
