// What the executor asks of a backend, which moves the data and does the arithmetic. Two backends exist: our kernels
// (kernel_backend.h, over any Store) and, in the PyTorch binding, a device's own ops.
#pragma once

#include <concepts>
#include <functional>
#include <span>

#include "ringspan/plan/plan.h"

namespace ringspan {

template <class B>
concept Exchanging = requires(B backend, std::span<const Transfer> transfers, int64_t step, bool gradients) {
  backend.post(transfers);        // begin all of them; returns at once
  backend.wait(step, gradients);  // until those that the step needs are complete here: the gradients, or all else
};

template <class B>
concept ForwardBackend = Exchanging<B> && requires(B backend, const Step& step) {
  // Adds the step's tiles to the softmax state; `begins` on the first step, `finishes` on the last (normalise, write).
  backend.attend(step, /*begins=*/true, /*finishes=*/true);
};

template <class B>
concept BackwardBackend = Exchanging<B> && requires(B backend, const Step& step, std::function<void()> arrived) {
  // Adds the gradients of the step's tiles; calls `arrived` once before it touches a gradient that travels, so that the
  // part of the other ranks travels while this rank computes.
  backend.attend_backward(step, arrived);
  // All gradients of this rank's own rows are in: convert and write them.
  backend.finish();
};

}  // namespace ringspan
