// Deadline: how long a rank waits for its peers without a sign of progress before it gives up.
#pragma once

#include <chrono>
#include <optional>

#include "binding/base/group.h"

namespace ringspan::binding {

// For every group of this process, in seconds; none: each group's own timeout. Error for what is no length of time.
void set_deadline(std::optional<double> seconds);

// What set_deadline gave, else RINGSPAN_DEADLINE in seconds, else the group's timeout. Error where the given one is
// longer than the group's timeout, which c10d keeps in any case, and for a variable that is no length of time.
std::chrono::milliseconds deadline_of(const Group& group);

// When a warning tells whom a rank waits for: after `first`, and again after each `next`.
struct WarningTimes {
  std::chrono::milliseconds first = std::chrono::seconds(30), next = std::chrono::minutes(5);
};
WarningTimes warning_times();
// For tests.
void set_warning_times(const WarningTimes& times);

}  // namespace ringspan::binding
