// The backends of ring/executor.h whose arithmetic is an op of the dispatcher, one call for each step of a plan:
//
//   ringspan::_step_forward     attends the step's tiles and adds the result to (out, max, sum)
//   ringspan::_step_backward    adds the gradients of the step's tiles to dq, dk, dv
//   ringspan::_step_refusal     what these two cannot do of a call, in words; "" = they can do all of it
//
// Accelerators register kernels for their dispatch key (python/ringspan/device). Exchange, agreement and plan are those
// of the CPU. The state is fp32 between steps, whatever an accelerator's own ops return.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ringspan/kernel/pair_inputs.h"
#include "ringspan/view/tensor_view.h"

#include "binding/group/torch_store.h"
#include "binding/op/call.h"

namespace ringspan::binding {

// The tensors of a call as the backends see them: [batch, heads, rows, dim] views over the caller's; statistics
// [batch, heads, rows].
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

// Whether the step ops run a call of these tensors: those of a device other than the CPU always, where they can, else
// Unsupported with the reason; on the CPU where someone has registered kernels and these can, else our own kernels run.
// `given` names the arguments that change the arithmetic: "sink", "attn_mask", "grad_lse" and so on.
bool choose_step_ops(const Call& call, const at::Tensor& query, const std::vector<std::string>& given);

// For plans that leave query rows where they are. Memory beside inputs and outputs: as docs/decisions/executor.md, and
// whatever the ops take.
class StepForward {
 public:
  StepForward(const Call& call, TorchStore& store, const ForwardTensors& tensors);

  void post(std::span<const Transfer> transfers) { store_.post(transfers); }
  void wait(int64_t step, bool gradients) { store_.wait(step, gradients); }
  void attend(const Step& step, bool begins, bool finishes);

 private:
  void join_sink();
  void empty_padding();

  const RankPlan& part_;
  TorchStore& store_;
  ForwardTensors tensors_;
  at::Tensor out_;  // normalised, fp32; the caller's where that is fp32
};

class StepBackward {
 public:
  StepBackward(const Call& call, TorchStore& store, const BackwardTensors& tensors);

  void post(std::span<const Transfer> transfers) { store_.post(transfers); }
  void wait(int64_t step, bool gradients) { store_.wait(step, gradients); }
  void attend_backward(const Step& step, const std::function<void()>& arrived);
  void finish();

 private:
  const RankPlan& part_;
  TorchStore& store_;
  BackwardTensors tensors_;
  at::Tensor dq_, dk_, dv_;  // where they are summed: fp32, or the caller's
};

}  // namespace ringspan::binding
