// The tensors of a call as the backends see them: [batch, heads, rows, dim] views over the caller's; statistics
// [batch, heads, rows].
#pragma once

#include <ATen/core/Tensor.h>

#include "ringspan/kernel/pair_inputs.h"
#include "ringspan/view/tensor_view.h"

namespace ringspan::binding {

struct ForwardTensors {
  at::Tensor q, k, v;
  at::Tensor out, max, sum, lse;
  at::Tensor sink;  // [heads] in the accumulator type; may be undefined
  PairInputs pairs{};
};

struct BackwardTensors {
  at::Tensor q, k, v, out, lse;
  at::Tensor grad_out;
  at::Tensor grad_lse;  // may be undefined
  at::Tensor dq, dk, dv;
  at::Tensor sink, dsink;  // [heads] in the accumulator type; may be undefined, both
  PairInputs pairs{};
  TensorView dbias{};  // as in GradsView
};

}  // namespace ringspan::binding
