#include "binding/watch/patience.h"

#include <algorithm>
#include <utility>

#include "ringspan/base/error.h"

#include "binding/watch/deadline.h"
#include "binding/watch/interpreter.h"

namespace ringspan::binding {

Patience::Patience(Watch& watch, std::chrono::milliseconds deadline, std::function<std::string()> describe)
    : watch_(watch),
      deadline_(deadline),
      describe_(std::move(describe)),
      next_warning_(begin_ + warning_times().first) {}

bool Patience::is_over() {
  const Clock::time_point now = Clock::now();
  std::string warning;
  if (now >= next_warning_) {
    next_warning_ = now + warning_times().next;
    warning = concat(describe_(), ", for ", static_cast<int64_t>(seconds()), " s by now; it gives up after ",
                     static_cast<double>(deadline_.count()) / 1e3, " s without a sign of progress");
  }
  serve_interpreter(warning);
  return now - std::max(begin_, watch_.overview().moved) >= deadline_;
}

double Patience::seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

}  // namespace ringspan::binding
