// The loop that runs a plan, written once for every schedule. It has no rank test and no mask test: all branching sits
// in the plan, and every rank makes the same sequence of posts and waits, also where it has nothing to compute.
//
//   step           0               1               2
//   exchange   | post 0 ------> wait 0 | post 1 -> wait 1 |
//   compute           | attend 0 |         | attend 1 |        | attend 2 |
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ringspan/plan/plan.h"
#include "ringspan/ring/backend.h"

namespace ringspan {

template <ForwardBackend Backend>
void run_forward(std::span<const Step> steps, Backend& backend) {
  int64_t first = -1, last = -1;
  for (const Step& step : steps) {
    if (!step.computes) continue;
    if (first < 0) first = step.step;
    last = step.step;
  }
  for (const Step& step : steps) {
    backend.wait(step.step, /*gradients=*/false);
    backend.post(std::span(step.before));
    if (step.computes) backend.attend(step, step.step == first, step.step == last);
    backend.post(std::span(step.after));
  }
  backend.wait(static_cast<int64_t>(steps.size()), /*gradients=*/false);
}

template <BackwardBackend Backend>
void run_backward(std::span<const Step> steps, Backend& backend) {
  for (const Step& step : steps) {
    backend.wait(step.step, /*gradients=*/false);
    backend.post(std::span(step.before));
    const auto arrived = [&] { backend.wait(step.step, /*gradients=*/true); };
    if (step.computes) {
      backend.attend_backward(step, arrived);
    } else {
      arrived();
    }
    backend.post(std::span(step.after));
  }
  for (const bool gradients : {false, true}) backend.wait(static_cast<int64_t>(steps.size()), gradients);
  backend.finish();
}

}  // namespace ringspan
