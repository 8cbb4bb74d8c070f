// From the ops' optional tensors and numbers to PairInputs: a bias, a boolean mask, slopes, a softcap, dropout.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ringspan/kernel/pair_inputs.h"
#include "ringspan/plan/plan.h"

#include "binding/agreement.h"
#include "binding/content_hash.h"

namespace ringspan::binding {

// As the inner ops are given them.
struct PairArguments {
  // Float; expands to [batch, query heads, local query rows, key positions].
  std::optional<at::Tensor> bias{};
  bool wants_bias_gradient = false;  // backward
  // Bool (or Byte), expands likewise; true = the pair takes part, or with `mask_means_masked` it does not. With
  // `mask_by_grid`: [rows, columns] counted inside each grid.
  std::optional<at::Tensor> mask{};
  bool mask_means_masked = false, mask_by_grid = false;
  // [query heads] or [batch, query heads], fp32 or the accumulator type.
  std::optional<at::Tensor> slopes{};
  double softcap = 0;    // 0 = none
  double dropout_p = 0;  // 0 = none
  int64_t seed = 0;
  bool seed_is_drawn = false;
  // Where the draws of this call's pairs begin; the number of heads of the undivided call.
  int64_t offset = 0, batch_offset = 0, head_offset = 0, total_heads = 0;
  int64_t slope_shift = 0;
  bool slope_of_root = false;
  double bias_factor = 1;
  std::vector<PairGrid> grids{};  // empty = one, the whole call's
};

// The numbers among them that cross the dispatcher in one list.
enum Place : size_t { kOffset, kBatchOffset, kHeadOffset, kTotalHeads, kSlopeShift, kSeedIsDrawn, kNumPlaces };
// Error where the list has another length; else fills in the numbers.
void read_places(at::IntArrayRef places, PairArguments& arguments);

// What must be the same on every rank, as one number and in words.
uint64_t hash_of(const PairArguments& arguments);
Fields describe(const PairArguments& arguments);

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
  at::Tensor bias_, mask_, slopes_;  // expanded
  at::Tensor own_bias_;
  bool mask_means_masked_ = false, mask_by_grid_ = false;
  at::ScalarType accumulator_ = at::kFloat;
  std::vector<int64_t> full_;
  std::vector<PairGrid> grids_;
};

}  // namespace ringspan::binding
