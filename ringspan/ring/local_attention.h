// LocalAttention: one rank's arithmetic during a ring call, wherever the K/V of a step come from. Backends add the
// exchange. Keeps the running state between steps without a second copy: in fp32 and fp64 it lives in the caller's
// outputs, in bf16 and fp16 in one fp32 buffer of the size of out (forward) or dq (backward).
#pragma once

#include <functional>

#include "ringspan/base/parallel.h"
#include "ringspan/kernel/attention.h"
#include "ringspan/plan/plan.h"
#include "ringspan/ring/buffer.h"
#include "ringspan/softmax/softmax_state.h"

namespace ringspan {

// What enters the softmax beside q, k and v (kernel/attention.h, kernel/pair_inputs.h).
struct Extras {
  ConstTensorView sink{};  // [1, q heads, 1, 1] in the accumulator type, the same on every rank; an empty view = none
  PairInputs pairs{};      // bias and mask: this rank's rows, all key positions; all else the same on every rank
};

// Gradients of this rank's rows, in the dtype of the inputs.
struct GradsView {
  TensorView dq, dk, dv;
  // This rank's part, in the accumulator type: the sum over all ranks is the gradient. Empty where there is no sink.
  TensorView dsink{};
  // Of extras.pairs.bias, as BackwardArgs::dbias; added to. Empty = not wanted. Elements that ranks share get this
  // rank's part.
  TensorView dbias{};
};

class LocalForward {
 public:
  // `part`, and what the views look at, live as long as this.
  LocalForward(const RankPlan& part, const ConstTensorView& q, const OutputView& output, const Extras& extras,
               const Parallel& parallel);

  // k, v: the step's K/V, rows of their owner.
  void attend(std::span<const Tile> tiles, const ConstTensorView& k, const ConstTensorView& v, bool begins,
              bool finishes);

 private:
  void empty_padding() const;

  const RankPlan& part_;
  ConstTensorView q_;
  OutputView output_;
  Extras extras_;
  const Parallel& parallel_;
  SoftmaxState state_;
  Buffer acc_;
};

class LocalBackward {
 public:
  // `lse` of the finished rows; `dlse` may be an empty view (no gradient flows into lse).
  LocalBackward(double scale, const ConstTensorView& q, const ConstTensorView& out, const ConstTensorView& lse,
                const ConstTensorView& dout, const ConstTensorView& dlse, const GradsView& grads, const Extras& extras,
                const Parallel& parallel);

  // Adds to dk, dv (accumulator type; `begins`: overwrites them), after calling `arrived`.
  void attend(std::span<const Tile> tiles, const ConstTensorView& k, const ConstTensorView& v, const TensorView& dk,
              const TensorView& dv, bool begins, const std::function<void()>& arrived);
  // Writes dq in the caller's dtype.
  void finish();

 private:
  double scale_;
  ConstTensorView q_, lse_, dout_;
  PairInputs pairs_;
  TensorView dq_, dbias_;  // the caller's
  TensorView dq_sum_;      // where it is summed
  const Parallel& parallel_;
  bool first_ = true;
  Buffer delta_, dq_buffer_;
  TensorView delta_view_;
};

}  // namespace ringspan
