// Store: the tensors of one rank during a call, the caller's and the buffers of the plan's slots, and the transfers
// between them and those of other ranks. The core's moves bytes over a Transport, the binding's over c10d.
#pragma once

#include <span>

#include "ringspan/plan/plan.h"
#include "ringspan/view/tensor_view.h"

namespace ringspan {

class Store {
 public:
  virtual ~Store() = default;

  // Makes `tensor` [batch, heads, rows, dim] what slot kOwnSlot holds of a payload. Only gradients and results are
  // written to. A gradient may have the dtype of the call where nothing is added to it.
  virtual void bind(Payload payload, const TensorView& tensor) = 0;

  // The tensor of a payload for an operand's rows and heads; of a slot that nothing has arrived in: new memory.
  virtual TensorView view(Payload payload, const Operand& operand) = 0;

  // Begins all of them; returns at once.
  virtual void post(std::span<const Transfer> transfers) = 0;
  // Until those that step `step` needs are complete on this rank, with what they add added: the gradients, or all else.
  virtual void wait(int64_t step, bool gradients) = 0;
  // Whether that has anything to wait for.
  virtual bool awaits(int64_t step, bool gradients) const = 0;
};

}  // namespace ringspan
