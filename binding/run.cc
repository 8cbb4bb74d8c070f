#include "binding/run.h"

#include <ATen/ATen.h>

#include "ringspan/ring/executor.h"

#include "binding/parallel.h"
#include "binding/step_backend.h"
#include "binding/tensors.h"
#include "binding/torch_backend.h"

namespace ringspan::binding {

using at::Tensor;

Output run_attention(const Call& call, const Operands& operands) {
  const Problem& p = call.problem();
  const int64_t rows = call.plan->q_rows[call.group.rank];
  const auto stats_options = operands.query.options().dtype(torch_dtype(accumulator_of(p.dtype)));
  const auto stats = [&] { return at::empty({p.batch, p.q_heads, rows}, stats_options); };
  const Output output{at::empty(shape_in(call.layout, p.batch, p.q_heads, rows, p.v_dim), operands.query.options()),
                      stats(), stats(), stats()};
  const ForwardTensors tensors{.q = as_bnsd(operands.query, call.layout, p.q_heads),
                               .k = as_bnsd(operands.key, call.layout, p.kv_heads),
                               .v = as_bnsd(operands.value, call.layout, p.kv_heads),
                               .out = as_bnsd(output.out, call.layout, p.q_heads),
                               .max = output.max,
                               .sum = output.sum,
                               .lse = output.lse,
                               .sink = operands.sink,
                               .pairs = operands.pairs.inputs(operands.seed)};
  if (call.by_step_ops) {
    StepForward backend(call, tensors);
    run_forward(call.plan->forward, backend);
  } else {
    TorchForward backend(call, tensors, torch_parallel());
    run_forward(call.plan->forward, backend);
  }
  return output;
}

InputGradients run_attention_backward(const Call& call, const Operands& operands, const OutputGradients& gradients,
                                      bool wants_bias) {
  const Problem& p = call.problem();
  const auto none = [&] { return at::empty({0}, gradients.lse.options()); };
  InputGradients result{empty_dense(operands.query), empty_dense(operands.key), empty_dense(operands.value),
                        operands.sink.defined() ? at::empty_like(operands.sink) : none(),
                        wants_bias ? operands.pairs.make_bias_gradient() : none()};
  const Tensor grad_out = gradients.grad_out.defined()
                              ? gradients.grad_out
                              : at::zeros({}, gradients.out.options()).expand(gradients.out.sizes());
  const BackwardTensors tensors{.q = as_bnsd(operands.query, call.layout, p.q_heads),
                                .k = as_bnsd(operands.key, call.layout, p.kv_heads),
                                .v = as_bnsd(operands.value, call.layout, p.kv_heads),
                                .out = as_bnsd(gradients.out, call.layout, p.q_heads),
                                .lse = gradients.lse,
                                .grad_out = as_bnsd(grad_out, call.layout, p.q_heads),
                                .grad_lse = gradients.grad_lse,
                                .dq = as_bnsd(result.query, call.layout, p.q_heads),
                                .dk = as_bnsd(result.key, call.layout, p.kv_heads),
                                .dv = as_bnsd(result.value, call.layout, p.kv_heads),
                                .sink = operands.sink,
                                .dsink = operands.sink.defined() ? result.sink : Tensor(),
                                .pairs = operands.pairs.inputs(operands.seed),
                                .dbias = wants_bias ? operands.pairs.bias_gradient_view(result.bias) : TensorView{}};
  if (call.by_step_ops) {
    StepBackward backend(call, tensors);
    run_backward(call.plan->backward, backend);
  } else {
    TorchBackward backend(call, tensors, torch_parallel());
    run_backward(call.plan->backward, backend);
  }
  return result;
}

}  // namespace ringspan::binding
