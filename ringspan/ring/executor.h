// The ring loop, written once. It has no rank test and no mask test: all branching sits in the plan, and every rank
// makes the same sequence of posts and waits, also where it has nothing to compute.
//
//   step           0               1               2
//   exchange   | post 0 ------> wait 0 | post 1 -> wait 1 |
//   compute           | attend 0 |         | attend 1 |        | attend 2 |
#pragma once

#include <cstddef>
#include <span>

#include "ringspan/plan/plan.h"
#include "ringspan/ring/backend.h"

namespace ringspan {

template <ForwardBackend Backend>
void run_forward(std::span<const Step> steps, Backend& backend) {
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (i > 0) backend.wait(std::span<const Transfer>(steps[i - 1].before));
    backend.post(std::span<const Transfer>(steps[i].before));
    backend.attend(steps[i], i == 0, i + 1 == steps.size());
  }
}

// The gradients of K/V follow one step behind: what a rank sent after step i - 1 is added to in step i.
template <BackwardBackend Backend>
void run_backward(std::span<const Step> steps, Backend& backend) {
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (i > 0) backend.wait(std::span<const Transfer>(steps[i - 1].before));
    backend.post(std::span<const Transfer>(steps[i].before));
    backend.attend_backward(steps[i], [&] {
      if (i > 0) backend.wait(std::span<const Transfer>(steps[i - 1].after));
    });
    backend.post(std::span<const Transfer>(steps[i].after));
  }
  backend.wait(std::span<const Transfer>(steps.back().after));
  backend.finish(steps.back());
}

}  // namespace ringspan
