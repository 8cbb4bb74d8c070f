// The two passes of a call that is checked and agreed on.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "binding/group/live_call.h"
#include "binding/op/call.h"
#include "binding/op/pair_arguments.h"

namespace ringspan::binding {

// Tensors in the layout of the call.
struct Operands {
  at::Tensor query, key, value;
  at::Tensor sink;  // as prepare_sink gives it; may be undefined
  PairOperands pairs;
  int64_t seed = 0;  // as agreed
};

struct Output {
  at::Tensor out;            // in the layout of the call
  at::Tensor max, sum, lse;  // [batch, heads, local rows]
};
Output run_attention(LiveCall& live, const Call& call, const Operands& operands);

struct OutputGradients {
  at::Tensor out, lse;            // of the forward
  at::Tensor grad_out, grad_lse;  // may be undefined
};
struct InputGradients {
  at::Tensor query, key, value;
  at::Tensor sink;  // in the accumulator type, this rank's part; [0] without a sink
  at::Tensor bias;  // likewise, of the bias's own shape; [0] where not wanted
};
InputGradients run_attention_backward(LiveCall& live, const Call& call, const Operands& operands,
                                      const OutputGradients& gradients, bool wants_bias);

}  // namespace ringspan::binding
