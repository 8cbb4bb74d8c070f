// The two backends of ring/executor.h over tensors and c10d. They add the exchange to LocalForward and LocalBackward.
//
// Memory beside inputs and outputs (KV = one shard of K and V in the input dtype, dKV = the same in fp32 or fp64):
//   forward    2 KV; fp32 out for 16-bit inputs. all_gather: (world + 1) KV.
//   backward   2 KV, 2 dKV, fp32 dq for 16-bit inputs; p2p with 16-bit inputs one dKV more. all_gather: KV as forward.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include <ATen/core/Tensor.h>

#include "ringspan/ring/local_attention.h"

#include "binding/call.h"
#include "binding/exchange.h"
#include "binding/pair_sources.h"

namespace ringspan::binding {

// All [batch, heads, rows, dim] views over the tensors of the call; statistics [batch, heads, rows].
struct ForwardTensors {
  at::Tensor q, k, v;
  at::Tensor out, max, sum, lse;
  at::Tensor sink;  // [heads] in the accumulator type; may be undefined
  PairInputs pairs{};
};

struct BackwardTensors {
  at::Tensor q, k, v, out, lse;
  at::Tensor grad_out;
  at::Tensor grad_lse;  // may be undefined
  at::Tensor dq, dk, dv;
  at::Tensor sink, dsink;  // [heads] in the accumulator type; may be undefined, both
  PairInputs pairs{};
  TensorView dbias{};  // as in GradsView
};

class TorchForward {
 public:
  TorchForward(const Call& call, const ForwardTensors& tensors, const Parallel& parallel);

  void post(std::span<const Transfer> transfers) { kv_->post(transfers); }
  void wait(std::span<const Transfer> transfers) { kv_->wait(transfers); }
  void attend(const Step& step, bool begins, bool finishes);

 private:
  std::unique_ptr<PairSource> kv_;
  LocalForward local_;
};

class TorchBackward {
 public:
  TorchBackward(const Call& call, const BackwardTensors& tensors, const Parallel& parallel);

  void post(std::span<const Transfer> transfers) { pairs_.post(transfers); }
  void wait(std::span<const Transfer> transfers) { pairs_.wait(transfers); }
  void attend_backward(const Step& step, const std::function<void()>& arrived);
  void finish(const Step& last);

 private:
  BackwardPairs pairs_;
  LocalBackward local_;
};

}  // namespace ringspan::binding
