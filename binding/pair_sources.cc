#include "binding/pair_sources.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "binding/tensors.h"

namespace ringspan::binding {
namespace {

std::unique_ptr<FlatExchange> make_exchange(const Call& call) {
  if (call.group.size == 1) return nullptr;
  return call.exchange == Exchange::kP2p ? make_p2p(call.group) : make_all_to_all(call.group);
}

at::ScalarType accumulator(const Call& call) { return torch_dtype(accumulator_of(call.problem().dtype)); }

// Gradients that start at the owner never stay at home; else they are summed there in the accumulator type.
Pair make_home(const Call& call, const Pair& grads) {
  const at::ScalarType wide = accumulator(call);
  if (grads.k.scalar_type() == wide || call.plan->grad_route == GradRoute::kFromOwner) return grads;
  return {at::empty(grads.k.sizes(), grads.k.options().dtype(wide)),
          at::empty(grads.v.sizes(), grads.v.options().dtype(wide))};
}

bool carries_gradients(std::span<const Transfer> transfers) {
  return !transfers.empty() && is_kv_gradient(transfers.front());
}

}  // namespace

std::unique_ptr<PairSource> make_kv(const Call& call, const Pair& own) {
  if (call.exchange == Exchange::kAllGather) return std::make_unique<GatheredKv>(*call.plan, call.group, own);
  return std::make_unique<SlotRing>(*call.plan, make_exchange(call), own.k.scalar_type(), own);
}

BackwardPairs::BackwardPairs(const Call& call, const Pair& kv, const Pair& gradients)
    : part_(*call.plan),
      grads_(gradients),
      home_(make_home(call, grads_)),
      kv_(make_kv(call, kv)),
      dkv_(std::make_unique<SlotRing>(part_, make_exchange(call), accumulator(call), home_)) {}

void BackwardPairs::post(std::span<const Transfer> transfers) {
  (carries_gradients(transfers) ? dkv_ : kv_)->post(transfers);
}

void BackwardPairs::wait(std::span<const Transfer> transfers) {
  (carries_gradients(transfers) ? dkv_ : kv_)->wait(transfers);
}

void BackwardPairs::finish(const Step& last) {
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
