#include "binding/watch/deadline.h"

#include <cmath>
#include <cstdlib>
#include <mutex>
#include <string>

#include "ringspan/base/error.h"

namespace ringspan::binding {
namespace {

struct Settings {
  std::mutex mutex;
  std::optional<std::chrono::milliseconds> deadline;
  WarningTimes warnings;
};

// Never destroyed: a call may still wait while static objects go.
Settings& settings() {
  static auto& settings = *new Settings;
  return settings;
}

// A thousand years: more than any timeout, and no overflow in milliseconds.
constexpr double kMostSeconds = 3.2e10;

std::chrono::milliseconds read_seconds(const char* name, double seconds, const std::string& text) {
  RINGSPAN_CHECK(seconds > 0 && seconds <= kMostSeconds, name, " is ", text,
                 "; give seconds above 0, at most the timeout of the group");
  return std::chrono::milliseconds(static_cast<int64_t>(std::ceil(seconds * 1e3)));
}

std::optional<std::chrono::milliseconds> deadline_of_environment() {
  const char* text = std::getenv("RINGSPAN_DEADLINE");
  if (!text || !*text) return std::nullopt;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  return read_seconds("RINGSPAN_DEADLINE", *end ? std::nan("") : seconds, concat('"', text, '"'));
}

}  // namespace

void set_deadline(std::optional<double> seconds) {
  std::optional<std::chrono::milliseconds> deadline;
  if (seconds) deadline = read_seconds("the deadline", *seconds, concat(*seconds));
  const std::lock_guard lock(settings().mutex);
  settings().deadline = deadline;
}

std::chrono::milliseconds deadline_of(const Group& group) {
  std::optional<std::chrono::milliseconds> given;
  {
    const std::lock_guard lock(settings().mutex);
    given = settings().deadline;
  }
  if (!given) given = deadline_of_environment();
  const std::chrono::milliseconds timeout = group.timeout();
  RINGSPAN_CHECK(!given || *given <= timeout, "the deadline is ", static_cast<double>(given->count()) / 1e3,
                 " s and the timeout of the group ", static_cast<double>(timeout.count()) / 1e3,
                 " s; a deadline can only be shorter: make the group with a longer timeout");
  return given.value_or(timeout);
}

WarningTimes warning_times() {
  const std::lock_guard lock(settings().mutex);
  return settings().warnings;
}

void set_warning_times(const WarningTimes& times) {
  const std::lock_guard lock(settings().mutex);
  settings().warnings = times;
}

}  // namespace ringspan::binding
