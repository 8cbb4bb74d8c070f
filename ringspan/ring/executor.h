// Runs a plan on a backend, in the order of plan/walk.h, whatever the schedule. There is no rank test and no mask test
// here: all branching sits in the plan, and every rank makes the same sequence of posts and waits, also where it has
// nothing to compute.
//
//   step           0               1               2
//   exchange   | post 0 ------> wait 0 | post 1 -> wait 1 |
//   compute           | attend 0 |         | attend 1 |        | attend 2 |
#pragma once

#include <cstdint>
#include <span>

#include "ringspan/plan/walk.h"
#include "ringspan/ring/backend.h"

namespace ringspan {
namespace detail {

template <class Backend>
struct ForwardRun {
  Backend& backend;
  int64_t first, last;  // steps that compute

  void post(std::span<const Transfer> transfers) { backend.post(transfers); }
  void wait(int64_t step, bool gradients) {
    if (!gradients) backend.wait(step, gradients);  // forward has none
  }
  void compute(const Step& step) { backend.attend(step, step.step == first, step.step == last); }
};

template <class Backend>
struct BackwardRun {
  Backend& backend;
  int64_t waited_in = -1;  // the step whose gradients its computation has waited for

  void post(std::span<const Transfer> transfers) { backend.post(transfers); }
  void wait(int64_t step, bool gradients) {
    if (!gradients || waited_in != step) backend.wait(step, gradients);
  }
  void compute(const Step& step) {
    backend.attend_backward(step, [&] { backend.wait(step.step, /*gradients=*/true); });
    waited_in = step.step;
  }
};

}  // namespace detail

template <ForwardBackend Backend>
void run_forward(std::span<const Step> steps, Backend& backend) {
  int64_t first = -1, last = -1;
  for (const Step& step : steps) {
    if (!step.computes) continue;
    if (first < 0) first = step.step;
    last = step.step;
  }
  walk(steps, detail::ForwardRun<Backend>{backend, first, last});
}

template <BackwardBackend Backend>
void run_backward(std::span<const Step> steps, Backend& backend) {
  walk(steps, detail::BackwardRun<Backend>{backend});
  backend.finish();
}

}  // namespace ringspan
