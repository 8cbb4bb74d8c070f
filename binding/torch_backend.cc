#include "binding/torch_backend.h"

#include <ATen/ATen.h>

#include "binding/tensors.h"

namespace ringspan::binding {
namespace {

ConstTensorView optional_stats(const at::Tensor& stats) {
  return stats.defined() ? const_view(stats) : ConstTensorView{};
}

Extras extras_of(const at::Tensor& sink, const PairInputs& pairs) {
  return {.sink = sink.defined() ? const_view(sink.view({1, -1, 1, 1})) : ConstTensorView{}, .pairs = pairs};
}

GradsView grads_of(const BackwardTensors& tensors) {
  return {.dq = mutable_view(tensors.dq),
          .dk = mutable_view(tensors.dk),
          .dv = mutable_view(tensors.dv),
          .dsink = tensors.dsink.defined() ? mutable_view(tensors.dsink.view({1, -1, 1, 1})) : TensorView{},
          .dbias = tensors.dbias};
}

}  // namespace

TorchForward::TorchForward(const Call& call, const ForwardTensors& tensors, const Parallel& parallel)
    : kv_(make_kv(call, {tensors.k, tensors.v})),
      local_(
          *call.plan, const_view(tensors.q),
          {mutable_view(tensors.out), mutable_view(tensors.max), mutable_view(tensors.sum), mutable_view(tensors.lse)},
          extras_of(tensors.sink, tensors.pairs), parallel) {}

void TorchForward::attend(const Step& step, bool begins, bool finishes) {
  const Pair kv = kv_->slot(step.kv_slot, step.kv_owner);
  local_.attend(step.tiles, const_view(kv.k), const_view(kv.v), begins, finishes);
}

TorchBackward::TorchBackward(const Call& call, const BackwardTensors& tensors, const Parallel& parallel)
    : pairs_(call, {tensors.k, tensors.v}, {tensors.dk, tensors.dv}),
      local_(call.problem().scale, const_view(tensors.q), const_view(tensors.out), const_view(tensors.lse),
             const_view(tensors.grad_out), optional_stats(tensors.grad_lse), grads_of(tensors),
             extras_of(tensors.sink, tensors.pairs), parallel) {}

void TorchBackward::attend_backward(const Step& step, const std::function<void()>& arrived) {
  const Pair kv = pairs_.kv(step), dkv = pairs_.gradients(step);
  local_.attend(step.tiles, const_view(kv.k), const_view(kv.v), mutable_view(dkv.k), mutable_view(dkv.v),
                step.grad_begins, arrived);
}

void TorchBackward::finish(const Step& last) {
  local_.finish();
  pairs_.finish(last);
}

}  // namespace ringspan::binding
