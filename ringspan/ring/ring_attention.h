// The two calls of a C++ user: attention over one rank's shard, forward and backward, on any Transport.
#pragma once

#include "ringspan/base/parallel.h"
#include "ringspan/plan/plan.h"
#include "ringspan/ring/kernel_backend.h"
#include "ringspan/softmax/softmax_state.h"
#include "ringspan/transport/transport.h"

namespace ringspan {

// q [B, N, q rows, Dqk], k [B, Nkv, kv rows, Dqk], v [B, Nkv, kv rows, Dv]: this rank's rows in the order of its shard
// map, strides as they are, dtype of the problem. Writes out, max, sum, lse of its query rows. Every rank of the
// transport calls with its part of the same plan, and with the same extras given (extras.h says how, also where a rank
// has no query rows). Error (before anything is sent) where a view does not fit the
// plan; TransportError naming peer, step and transfer where a peer is lost.
void ring_forward(const RankPlan& part, Transport& transport, const ConstTensorView& q, const ConstTensorView& k,
                  const ConstTensorView& v, const OutputView& output, const Parallel& parallel = Serial(),
                  const Extras& extras = {});

// `output` of ring_forward, dout [B, N, q rows, Dv], dlse [B, N, q rows] or a default view. Writes this rank's
// gradients; those of K/V hold the parts of all ranks, that of the sink is this rank's part. `extras` as in forward.
void ring_backward(const RankPlan& part, Transport& transport, const ConstTensorView& q, const ConstTensorView& k,
                   const ConstTensorView& v, const OutputView& output, const ConstTensorView& dout,
                   const ConstTensorView& dlse, const GradsView& grads, const Parallel& parallel = Serial(),
                   const Extras& extras = {});
void ring_backward(const RankPlan& part, Transport& transport, const ConstTensorView& q, const ConstTensorView& k,
                   const ConstTensorView& v, const OutputView& output, const ConstTensorView& dout,
                   const GradsView& grads, const Parallel& parallel = Serial());

}  // namespace ringspan
