// Where the backends of ring/executor.h over tensors get the K/V of a step from, and where its gradients go.
#pragma once

#include <memory>
#include <span>

#include "binding/call.h"
#include "binding/exchange.h"

namespace ringspan::binding {

// K/V of every owner in turn, by the exchange of the call; `own` is [batch, kv_heads, rows, dim].
std::unique_ptr<PairSource> make_kv(const Call& call, const Pair& own);

// K/V on their way round and, one step behind, their gradients on the way home. Forwards the verbs of the executor.
class BackwardPairs {
 public:
  // `kv`: this rank's; `gradients`: the caller's, which finish() fills.
  BackwardPairs(const Call& call, const Pair& kv, const Pair& gradients);

  void post(std::span<const Transfer> transfers);
  void wait(std::span<const Transfer> transfers);
  Pair kv(const Step& step) { return kv_->slot(step.kv_slot, step.kv_owner); }
  // Where the step's gradients are added, in the accumulator type.
  Pair gradients(const Step& step) { return dkv_->slot(step.grad_slot, step.kv_owner); }
  void finish(const Step& last);

 private:
  const RankPlan& part_;
  Pair grads_;  // the caller's
  Pair home_;   // where gradients at home are summed: the caller's, or fp32 buffers
  std::unique_ptr<PairSource> kv_, dkv_;
};

}  // namespace ringspan::binding
