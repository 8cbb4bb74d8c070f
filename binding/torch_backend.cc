#include "binding/torch_backend.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "binding/tensors.h"

namespace ringspan::binding {
namespace {

std::unique_ptr<FlatExchange> make_exchange(const Call& call) {
  return call.exchange == Exchange::kP2p ? make_p2p(call.group) : make_all_to_all(call.group);
}

std::unique_ptr<PairSource> make_kv(const Call& call, const Pair& own) {
  if (call.exchange == Exchange::kAllGather) return std::make_unique<GatheredKv>(*call.plan, call.group, own);
  std::unique_ptr<FlatExchange> exchange = call.group.size > 1 ? make_exchange(call) : nullptr;
  return std::make_unique<SlotRing>(*call.plan, std::move(exchange), own.k.scalar_type(), own);
}

// Gradients that start at the owner never stay at home; else they are summed there in the accumulator type.
Pair make_home(const Call& call, const Pair& grads) {
  const at::ScalarType accumulator = torch_dtype(accumulator_of(call.problem().dtype));
  if (grads.k.scalar_type() == accumulator || call.plan->grad_route == GradRoute::kFromOwner) return grads;
  return {at::empty(grads.k.sizes(), grads.k.options().dtype(accumulator)),
          at::empty(grads.v.sizes(), grads.v.options().dtype(accumulator))};
}

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

bool carries_gradients(std::span<const Transfer> transfers) {
  return !transfers.empty() && is_kv_gradient(transfers.front());
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
    : part_(*call.plan),
      grads_{tensors.dk, tensors.dv},
      home_(make_home(call, grads_)),
      kv_(make_kv(call, {tensors.k, tensors.v})),
      dkv_(std::make_unique<SlotRing>(part_, call.group.size > 1 ? make_exchange(call) : nullptr,
                                      torch_dtype(accumulator_of(call.problem().dtype)), home_)),
      local_(call.problem().scale, const_view(tensors.q), const_view(tensors.out), const_view(tensors.lse),
             const_view(tensors.grad_out), optional_stats(tensors.grad_lse), grads_of(tensors),
             extras_of(tensors.sink, tensors.pairs), parallel) {}

void TorchBackward::post(std::span<const Transfer> transfers) {
  (carries_gradients(transfers) ? dkv_ : kv_)->post(transfers);
}

void TorchBackward::wait(std::span<const Transfer> transfers) {
  (carries_gradients(transfers) ? dkv_ : kv_)->wait(transfers);
}

void TorchBackward::attend_backward(const Step& step, const std::function<void()>& arrived) {
  const Pair kv = kv_->slot(step.kv_slot, step.kv_owner);
  const Pair dkv = dkv_->slot(step.grad_slot, step.kv_owner);
  local_.attend(step.tiles, const_view(kv.k), const_view(kv.v), mutable_view(dkv.k), mutable_view(dkv.v),
                step.grad_begins, arrived);
}

void TorchBackward::finish(const Step& last) {
  local_.finish();
  if (!last.after.empty()) {
    const auto arrival = std::find_if(last.after.begin(), last.after.end(),
                                      [&](const Transfer& transfer) { return transfer.dst == part_.rank; });
    const Pair arrived = dkv_->slot(arrival->dst_slot, part_.rank);
    if (part_.grad_route == GradRoute::kFromOwner) {
      grads_.k.copy_(arrived.k);
      grads_.v.copy_(arrived.v);
      return;
    }
    home_.k.add_(arrived.k);
    home_.v.add_(arrived.v);
  }
  if (!home_.k.is_same(grads_.k)) {
    grads_.k.copy_(home_.k);
    grads_.v.copy_(home_.v);
  }
}

}  // namespace ringspan::binding
