// The two calls of a C++ user: attention over one rank's shard, forward and backward, on any Transport.
#pragma once

#include "ringspan/base/parallel.h"
#include "ringspan/plan/plan.h"
#include "ringspan/ring/kernel_backend.h"
#include "ringspan/softmax/softmax_state.h"
#include "ringspan/transport/transport.h"

namespace ringspan {

// What a call has beside its tensors. The Parallel lives as long as the call; none: on the calling thread.
struct RingOptions {
  const Parallel* parallel = nullptr;
  Extras extras{};
};

// q [B, N, q rows, Dqk], k [B, Nkv, kv rows, Dqk], v [B, Nkv, kv rows, Dv]: this rank's rows in the order of its shard
// map, strides as they are, dtype of the problem. Writes out, max, sum, lse of its query rows. Every rank of the
// transport calls with its part of the same plan, and with the same extras given (extras.h says how, also where a rank
// has no query rows). Error (before anything is sent) where a view does not fit the plan; TransportError naming peer,
// step and transfer where a peer is lost.
void ring_forward(const RankPlan& part, Transport& transport, const InputsView& inputs, const OutputView& output,
                  const RingOptions& options = {});

// Takes `output` of ring_forward, dout [B, N, q rows, Dv], dlse [B, N, q rows] or a default view. Writes this rank's
// gradients; those of K/V hold the parts of all ranks, that of the sink is this rank's part. Options as in forward.
void ring_backward(const RankPlan& part, Transport& transport, const BackwardInputsView& inputs, const GradsView& grads,
                   const RingOptions& options = {});

// The same for calls of tensors alone.
inline void ring_forward(const RankPlan& part, Transport& transport, const ConstTensorView& q, const ConstTensorView& k,
                         const ConstTensorView& v, const OutputView& output) {
  ring_forward(part, transport, {q, k, v}, output, {});
}
inline void ring_backward(const RankPlan& part, Transport& transport, const ConstTensorView& q,
                          const ConstTensorView& k, const ConstTensorView& v, const OutputView& output,
                          const ConstTensorView& dout, const GradsView& grads) {
  ring_backward(part, transport, {{q, k, v}, output, dout}, grads, {});
}

}  // namespace ringspan
