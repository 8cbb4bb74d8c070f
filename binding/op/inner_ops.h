// The two inner ops: attention over a group without autograd, forward and backward. Opaque to tracing: the kernels run
// the ring, the Meta kernels only know shapes.
#pragma once

#include <ATen/core/Tensor.h>

#include "binding/op/arguments.h"

namespace ringspan::binding {

struct ForwardResult {
  at::Tensor out, max, sum, lse;
  at::Tensor call;  // BackwardCall::number
};
// Through the dispatcher.
ForwardResult call_attention_forward(const ForwardCall& call);

struct BackwardResult {
  at::Tensor query, key, value;
  at::Tensor sink, bias;  // this rank's part, in the dtype of the input; [0] where there is none or nobody wants it
};
BackwardResult call_attention_backward(const BackwardCall& call);

}  // namespace ringspan::binding
