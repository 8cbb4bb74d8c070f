#include "binding/pair_arguments.h"

#include <bit>
#include <cmath>

#include <ATen/ATen.h>

#include "ringspan/base/error.h"

#include "binding/tensors.h"

namespace ringspan::binding {
namespace {

at::Tensor expanded(const char* name, const at::Tensor& tensor, const std::vector<int64_t>& full) {
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
  return tensor.expand(full);
}

ByteMaskView mask_view(const at::Tensor& mask, bool masked_value, bool by_grid) {
  ByteMaskView view(static_cast<const std::byte*>(mask.const_data_ptr()), {}, {});
  for (int axis = 0; axis < 4; ++axis) {
    view.size[axis] = mask.size(axis);
    view.stride[axis] = mask.stride(axis);
  }
  view.masked_value = masked_value;
  view.rows_are_grids = by_grid;
  return view;
}

at::Tensor dense_slopes(const at::Tensor& slopes, const Problem& p, at::ScalarType accumulator) {
  RINGSPAN_CHECK(slopes.device().is_cpu(), "slopes lie on ", slopes.device().str(), "; move them to the CPU");
  const bool shared = slopes.dim() == 1 && slopes.size(0) == p.q_heads;
  const bool by_batch = slopes.dim() == 2 && slopes.size(0) == p.batch && slopes.size(1) == p.q_heads;
  RINGSPAN_CHECK(shared || by_batch, "slopes have shape ", slopes.sizes(), "; give [", p.q_heads, "] or [", p.batch,
                 ", ", p.q_heads, "], one for each query head");
  RINGSPAN_CHECK(slopes.scalar_type() == at::kFloat || slopes.scalar_type() == accumulator, "slopes are ",
                 toString(slopes.scalar_type()), "; they must be Float",
                 accumulator == at::kDouble ? " or Double" : "");
  return slopes.to(accumulator).expand({p.batch, p.q_heads}).unsqueeze(-1).unsqueeze(-1);
}

void check_numbers(const PairArguments& arguments, const Problem& p) {
  RINGSPAN_CHECK(std::isfinite(arguments.softcap) && arguments.softcap >= 0, "softcap is ", arguments.softcap,
                 "; it must be a positive number, or 0 for none");
  RINGSPAN_CHECK(arguments.dropout_p >= 0 && arguments.dropout_p < 1, "dropout_p is ", arguments.dropout_p,
                 "; it must be at least 0 and below 1");
  for (const auto& [name, value] :
       {std::pair("offset", arguments.offset), std::pair("batch_offset", arguments.batch_offset),
        std::pair("head_offset", arguments.head_offset)}) {
    RINGSPAN_CHECK(value >= 0, name, " is ", value, "; it must be at least 0");
  }
  if (arguments.dropout_p == 0) return;
  RINGSPAN_CHECK(arguments.total_heads >= arguments.head_offset + p.q_heads, "total_heads is ", arguments.total_heads,
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

void read_places(at::IntArrayRef places, PairArguments& arguments) {
  RINGSPAN_CHECK(places.size() == kNumPlaces, "places has ", places.size(), " numbers; it must have ",
                 static_cast<size_t>(kNumPlaces));
  arguments.offset = places[kOffset];
  arguments.batch_offset = places[kBatchOffset];
  arguments.head_offset = places[kHeadOffset];
  arguments.total_heads = places[kTotalHeads];
  arguments.slope_shift = places[kSlopeShift];
  arguments.seed_is_drawn = places[kSeedIsDrawn] != 0;
}

uint64_t hash_of(const PairArguments& a) {
  const int64_t given = (a.bias ? 1 : 0) | (a.mask ? 2 : 0) | (a.slopes ? 4 : 0);
  const std::vector<int64_t> words = {given,
                                      std::bit_cast<int64_t>(a.softcap),
                                      std::bit_cast<int64_t>(a.dropout_p),
                                      a.offset,
                                      a.batch_offset,
                                      a.head_offset,
                                      a.total_heads,
                                      a.slope_shift,
                                      a.slope_of_root,
                                      std::bit_cast<int64_t>(a.bias_factor)};
  return hash_words(words);
}

Fields describe(const PairArguments& a) {
  const auto given = [](const std::optional<at::Tensor>& tensor) { return tensor ? "given" : "none"; };
  return {{"attn_mask", given(a.mask)},
          {"bias", given(a.bias)},
          {"alibi", given(a.slopes)},
          {"softcap", concat(a.softcap)},
          {"dropout_p", concat(a.dropout_p)},
          {"offset", concat(a.offset)},
          {"batch_offset", concat(a.batch_offset)},
          {"head_offset", concat(a.head_offset)},
          {"total_heads", concat(a.total_heads)},
          {"alibi shift", concat(a.slope_shift)}};
}

PairOperands::PairOperands(const PairArguments& arguments, const Problem& p, int64_t q_rows)
    : accumulator_(torch_dtype(accumulator_of(p.dtype))), full_({p.batch, p.q_heads, q_rows, p.kv_len}) {
  check_numbers(arguments, p);
  numbers_.softcap = arguments.softcap;
  numbers_.dropout.p = arguments.dropout_p;
  numbers_.dropout.offset = static_cast<uint64_t>(arguments.offset);
  numbers_.slope_shift = arguments.slope_shift;
  if (arguments.bias) {
    own_bias_ = *arguments.bias;
    const DType dtype = core_dtype("bias", own_bias_);
    const bool widens = p.dtype == DType::kF64 ? size_of(dtype) >= 4 : dtype != DType::kF64;
    RINGSPAN_CHECK(widens, "bias is ", toString(own_bias_.scalar_type()), " and query ", name_of(p.dtype),
                   p.dtype == DType::kF64 ? "; it must be Float or Double" : "; it must be Float, BFloat16 or Half");
    bias_ = expanded("bias", own_bias_, full_);
  }
  if (arguments.mask) {
    const at::Tensor& mask = *arguments.mask;
    RINGSPAN_CHECK(mask.scalar_type() == at::kBool || (arguments.mask_means_masked && mask.scalar_type() == at::kByte),
                   "attn_mask is ", toString(mask.scalar_type()), "; it must be Bool here");
    const std::vector<int64_t> of_grid = {p.batch, p.q_heads, mask.size(-2), mask.size(-1)};
    mask_ = expanded("attn_mask", mask, arguments.mask_by_grid ? of_grid : full_);
    mask_means_masked_ = arguments.mask_means_masked;
    mask_by_grid_ = arguments.mask_by_grid;
  }
  if (arguments.slopes) slopes_ = dense_slopes(*arguments.slopes, p, accumulator_);
  numbers_.slope_of_root = arguments.slope_of_root;
  numbers_.bias_factor = arguments.bias_factor;
  grids_ = arguments.grids;
  if (grids_.empty()) grids_ = {grid_of(arguments, p)};
}

PairInputs PairOperands::inputs(int64_t seed) const {
  PairInputs inputs = numbers_;
  if (bias_.defined()) inputs.bias = const_view(bias_);
  if (mask_.defined()) inputs.mask = mask_view(mask_, mask_means_masked_, mask_by_grid_);
  if (slopes_.defined()) inputs.slopes = const_view(slopes_);
  inputs.dropout.seed = static_cast<uint64_t>(seed);
  inputs.grids = grids_;
  return inputs;
}

at::Tensor PairOperands::make_bias_gradient() const {
  return at::zeros(own_bias_.sizes(), own_bias_.options().dtype(accumulator_));
}

TensorView PairOperands::bias_gradient_view(const at::Tensor& gradient) const {
  return mutable_view(gradient.expand(full_));
}

}  // namespace ringspan::binding
