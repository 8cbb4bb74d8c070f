// KernelForward, KernelBackward: one rank's arithmetic with our kernels during a call, on whatever a Store holds. The
// running state between steps has no second copy: in fp32 and fp64 it lives where the output goes, in bf16 and fp16 in
// one fp32 buffer of the size of out (forward) or dq (backward).
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "ringspan/base/parallel.h"
#include "ringspan/kernel/attention.h"
#include "ringspan/plan/plan.h"
#include "ringspan/ring/buffer.h"
#include "ringspan/ring/extras.h"
#include "ringspan/ring/store.h"
#include "ringspan/softmax/softmax_state.h"

namespace ringspan {

// This rank's rows, in the dtype of the call.
struct InputsView {
  ConstTensorView q, k, v;
};

// What backward reads: forward's inputs and output, and the gradients of out and lse. `dlse` may be a default view (no
// gradient flows into lse).
struct BackwardInputsView {
  InputsView inputs;
  OutputView output;
  ConstTensorView dout, dlse{};
};

// Gradients of this rank's rows, in the dtype of the inputs.
struct GradsView {
  TensorView dq, dk, dv;
  // This rank's part, in the accumulator type: the sum over all ranks is the gradient. A default view where there is no
  // sink.
  TensorView dsink{};
  // Of extras.pairs.bias, as BackwardArgs::dbias; zeros at first. A default view = not wanted. Elements that ranks
  // share get this rank's part: a row that all queries share, also on a rank without query rows.
  TensorView dbias{};
};

class KernelForward {
 public:
  // Binds the caller's tensors to the store; Error where extras do not fit the plan. Everything lives as long as this.
  KernelForward(const RankPlan& part, Store& store, const InputsView& inputs, const OutputView& output,
                const Extras& extras, const Parallel& parallel);

  void post(std::span<const Transfer> transfers) { store_.post(transfers); }
  void wait(int64_t step, bool gradients) { store_.wait(step, gradients); }
  void attend(const Step& step, bool begins, bool finishes);

 private:
  struct Part {
    HeadPart heads;
    ConstTensorView q, sink;
    OutputView output;
    SoftmaxState state;
    Buffer acc;
  };

  void begin(const Step& step, bool finishes);
  void empty_padding(const OutputView& output) const;

  const RankPlan& part_;
  Store& store_;
  Extras extras_;
  const Parallel& parallel_;
  std::vector<Part> parts_;
};

class KernelBackward {
 public:
  KernelBackward(const RankPlan& part, Store& store, const BackwardInputsView& inputs, const GradsView& grads,
                 const Extras& extras, const Parallel& parallel);

  void post(std::span<const Transfer> transfers) { store_.post(transfers); }
  void wait(int64_t step, bool gradients) { store_.wait(step, gradients); }
  void attend_backward(const Step& step, const std::function<void()>& arrived);
  void finish();

 private:
  // A gradient of the caller's, and where it is summed.
  struct Home {
    TensorView caller, sum;
    Buffer buffer{};
  };

  void bind_gradient(Payload payload, const TensorView& caller, Home& home);
  void begin_dbias(const Operand& place, bool begins);
  // Where a step computes dq while what is in its place still travels.
  TensorView dq_apart(const Step& step);

  const RankPlan& part_;
  Store& store_;
  Extras extras_;
  GradsView grads_;
  const Parallel& parallel_;
  Buffer delta_, dq_apart_;
  Home dq_, dk_, dv_;
  bool dq_travels_ = false;  // queries visit this rank, with gradients of their own
};

}  // namespace ringspan
