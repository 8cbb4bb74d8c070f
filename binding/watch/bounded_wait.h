// Waits for c10d that end: by the work, by what the watch learns, or by the deadline.
#pragma once

#include <exception>
#include <stdexcept>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "binding/watch/patience.h"
#include "binding/watch/watch.h"

namespace ringspan::binding {

// The wait ended before the work did; `failure` says why.
class WaitEnded : public std::runtime_error {
 public:
  explicit WaitEnded(Failure failure) : std::runtime_error(failure.words), failure_(std::move(failure)) {}
  const Failure& failure() const { return failure_; }

 private:
  Failure failure_;
};

// The wait ended because of what a signal handler raised, such as KeyboardInterrupt; a work that ended with an error
// cannot be told from it otherwise.
struct WaitInterrupted {
  std::exception_ptr raised;
};

// Until a work of `group` is finished. On gloo: WaitEnded where a rank of the group has failed, or where the deadline
// of `patience` passed; WaitInterrupted with what `patience` throws; throws what the work failed with. Other backends
// do not hold up a CPU thread here, or cannot be asked: there it is the work's own wait.
void finish(const Group& group, const c10::intrusive_ptr<c10d::Work>& work, Watch& watch, Patience& patience);

}  // namespace ringspan::binding
