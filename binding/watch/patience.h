// Patience: one wait of a rank for its peers, as the thread that waits sees it.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "binding/watch/watch.h"

namespace ringspan::binding {

// The longest time that a waiting thread does not look around.
constexpr std::chrono::milliseconds kLook{50};

class Patience {
 public:
  // `describe`: whom this rank waits for, and in which call: "rank 0 waits for rank 1 in call 3 ...".
  Patience(Watch& watch, std::chrono::milliseconds deadline, std::function<std::string()> describe);

  // To be asked every kLook. Whether the deadline has passed since a peer last moved. Logs a warning when the wait is
  // long, and throws what a signal handler raises.
  bool is_over();
  // Since this wait began.
  double seconds() const;
  std::chrono::milliseconds deadline() const { return deadline_; }

 private:
  using Clock = std::chrono::steady_clock;

  Watch& watch_;
  const std::chrono::milliseconds deadline_;
  const std::function<std::string()> describe_;
  const Clock::time_point begin_ = Clock::now();
  Clock::time_point next_warning_;
};

}  // namespace ringspan::binding
