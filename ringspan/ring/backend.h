// What the ring loop asks of whoever moves the data and does the arithmetic. Three backends exist: the host's (views,
// our kernels, a Transport) and two of the PyTorch binding (tensors, c10d, and our kernels or a device's own ops).
#pragma once

#include <concepts>
#include <functional>
#include <span>

#include "ringspan/plan/plan.h"

namespace ringspan {

template <class B>
concept Exchanging = requires(B backend, std::span<const Transfer> transfers) {
  backend.post(transfers);  // begin all of them; returns at once
  backend.wait(transfers);  // until all of them are complete on this rank
};

template <class B>
concept ForwardBackend = Exchanging<B> && requires(B backend, const Step& step) {
  // Adds the step's tiles to the softmax state; `begins` on the first step, `finishes` on the last (normalise, write).
  backend.attend(step, /*begins=*/true, /*finishes=*/true);
};

template <class B>
concept BackwardBackend = Exchanging<B> && requires(B backend, const Step& step, std::function<void()> arrived) {
  // Adds the gradients of the step's tiles; calls `arrived` once before it touches the step's gradient slot, so that
  // the part of the other ranks travels while this rank computes.
  backend.attend_backward(step, arrived);
  // All gradients of this rank's own rows are in: convert and write them. `last` is the last step.
  backend.finish(/*last=*/step);
};

}  // namespace ringspan
