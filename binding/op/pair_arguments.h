// From the ops' optional tensors and numbers to PairInputs: a bias, a boolean mask, slopes, a softcap, dropout.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ringspan/kernel/pair_inputs.h"
#include "ringspan/plan/plan.h"

#include "binding/group/agreement.h"

namespace ringspan::binding {

// As the ops are given them.
struct PairArguments {
  // Float; expands to [batch, query heads, local query rows, key positions].
  std::optional<at::Tensor> bias{};
  bool wants_bias_gradient = false;
  // Bool (or Byte), expands likewise; true = the pair takes part, or with `mask_means_masked` it does not. With
  // `mask_by_grid`: [rows, columns] counted inside each grid.
  std::optional<at::Tensor> mask{};
  bool mask_means_masked = false, mask_by_grid = false;
  // [query heads] or [batch, query heads], fp32 or the accumulator type.
  std::optional<at::Tensor> slopes{};
  PairInputs inputs{};  // of these the numbers alone
  int64_t seed = 0;
  bool seed_is_drawn = false;
  // Where the draws of this call's pairs begin; the number of heads of the undivided call.
  int64_t offset = 0, batch_offset = 0, head_offset = 0, total_heads = 0;
  std::vector<PairGrid> grids{};  // empty = one, the whole call's
};

// [.., rows, keys] or fewer dimensions.
RowReading reading_of(const at::Tensor& tensor, int64_t q_rows);

// Batch entries and heads of a tensor that expands to [batch, heads, rows, keys]; 1 where it has no such axis.
int64_t batch_of_pairs(const at::Tensor& tensor);
int64_t heads_of_pairs(const at::Tensor& tensor);

// PairInputs and what it looks at.
class PairOperands {
 public:
  PairOperands() = default;
  // Error naming the argument that does not fit, with both values.
  PairOperands(const PairArguments& arguments, const Problem& problem, int64_t q_rows);

  // Views into this object. `seed` as the ranks agreed.
  PairInputs inputs(int64_t seed) const;
  // Zeros of the bias's own shape in the accumulator type, and the view that shares elements as the bias does.
  at::Tensor make_bias_gradient() const;
  TensorView bias_gradient_view(const at::Tensor& gradient) const;

 private:
  PairInputs numbers_;
  std::optional<at::Tensor> bias_, mask_;  // as given
  at::Tensor slopes_;                      // [batch, query heads, 1, 1]
  bool mask_means_masked_ = false, mask_by_grid_ = false;
  at::ScalarType accumulator_ = at::kFloat;
  std::vector<int64_t> full_, full_mask_;  // what they expand to
  std::vector<PairGrid> grids_;
};

}  // namespace ringspan::binding
