// Walk: the order in which a rank does one pass of its plan. Executor, memory count and simulator follow this one.
//
//     step s     wait for inputs | post `before` | compute | wait for gradients | post `after`
//     the end    wait for inputs |               |         | wait for gradients |
//
// A step's first posts travel while its tiles are computed. Gradients are waited for after the tiles, since another
// rank's part may travel while this rank computes its own.
#pragma once

#include <cstdint>
#include <span>

#include "ringspan/plan/plan.h"

namespace ringspan {

enum class Act : uint8_t { kWaitInputs, kPostBefore, kCompute, kWaitGradients, kPostAfter, kDone };

// A place in a pass, for those who pause between acts. The end has the number of the steps as its step.
class Walk {
 public:
  explicit Walk(int64_t num_steps) : num_steps_(num_steps) {}

  int64_t step() const { return step_; }
  Act act() const { return act_; }
  bool is_at_end() const { return step_ == num_steps_; }
  bool is_done() const { return act_ == Act::kDone; }

  void next() {
    if (act_ == Act::kPostAfter) {
      ++step_;
      act_ = Act::kWaitInputs;
    } else if (is_at_end()) {
      act_ = act_ == Act::kWaitInputs ? Act::kWaitGradients : Act::kDone;
    } else {
      act_ = static_cast<Act>(static_cast<uint8_t>(act_) + 1);
    }
  }

 private:
  int64_t num_steps_, step_ = 0;
  Act act_ = Act::kWaitInputs;
};

// All of it at once: visitor.wait(step, gradients), visitor.post(transfers), and visitor.compute(step) for the steps
// that compute.
template <class Visitor>
void walk(std::span<const Step> steps, Visitor&& visitor) {
  for (Walk at(static_cast<int64_t>(steps.size())); !at.is_done(); at.next()) {
    switch (at.act()) {
      case Act::kWaitInputs: visitor.wait(at.step(), /*gradients=*/false); break;
      case Act::kPostBefore: visitor.post(std::span(steps[at.step()].before)); break;
      case Act::kCompute:
        if (steps[at.step()].computes) visitor.compute(steps[at.step()]);
        break;
      case Act::kWaitGradients: visitor.wait(at.step(), /*gradients=*/true); break;
      case Act::kPostAfter: visitor.post(std::span(steps[at.step()].after)); break;
      case Act::kDone: break;
    }
  }
}

}  // namespace ringspan
