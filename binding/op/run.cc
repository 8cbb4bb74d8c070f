#include "binding/op/run.h"

#include <ATen/ATen.h>

#include "ringspan/ring/executor.h"
#include "ringspan/ring/kernel_backend.h"

#include "binding/base/parallel.h"
#include "binding/base/tensors.h"
#include "binding/group/torch_store.h"
#include "binding/op/step_backend.h"

namespace ringspan::binding {

using at::Tensor;

namespace {

ConstTensorView optional_stats(const Tensor& stats) { return stats.defined() ? const_view(stats) : ConstTensorView{}; }

Extras extras_of(const Tensor& sink, const PairInputs& pairs) {
  return {.sink = sink.defined() ? const_view(sink.view({1, -1, 1, 1})) : ConstTensorView{}, .pairs = pairs};
}

OutputView output_of(const ForwardTensors& t) {
  return {mutable_view(t.out), mutable_view(t.max), mutable_view(t.sum), mutable_view(t.lse)};
}

GradsView grads_of(const BackwardTensors& t) {
  return {.dq = mutable_view(t.dq),
          .dk = mutable_view(t.dk),
          .dv = mutable_view(t.dv),
          .dsink = t.dsink.defined() ? mutable_view(t.dsink.view({1, -1, 1, 1})) : TensorView{},
          .dbias = t.dbias};
}

}  // namespace

Output run_attention(LiveCall& live, const Call& call, const Operands& operands) {
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
  TorchStore store(live, call.group, call.exchange, *call.plan, call.plan->forward, operands.query);
  if (call.by_step_ops) {
    StepForward backend(call, store, tensors);
    run_forward(call.plan->forward, backend);
  } else {
    KernelForward backend(*call.plan, store, {const_view(tensors.q), const_view(tensors.k), const_view(tensors.v)},
                          output_of(tensors), extras_of(tensors.sink, tensors.pairs), torch_parallel());
    run_forward(call.plan->forward, backend);
  }
  return output;
}

InputGradients run_attention_backward(LiveCall& live, const Call& call, const Operands& operands,
                                      const OutputGradients& gradients, bool wants_bias) {
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
  TorchStore store(live, call.group, call.exchange, *call.plan, call.plan->backward, operands.query);
  if (call.by_step_ops) {
    StepBackward backend(call, store, tensors);
    run_backward(call.plan->backward, backend);
  } else {
    const OutputView saved{mutable_view(tensors.out), {}, {}, mutable_view(tensors.lse)};
    const BackwardInputsView inputs{.inputs = {const_view(tensors.q), const_view(tensors.k), const_view(tensors.v)},
                                    .output = saved,
                                    .dout = const_view(tensors.grad_out),
                                    .dlse = optional_stats(tensors.grad_lse)};
    KernelBackward backend(*call.plan, store, inputs, grads_of(tensors), extras_of(tensors.sink, tensors.pairs),
                           torch_parallel());
    run_backward(call.plan->backward, backend);
  }
  return result;
}

}  // namespace ringspan::binding
