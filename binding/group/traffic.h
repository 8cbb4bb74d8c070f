// Traffic: what this process has posted through c10d, by group. Read by tests and the bench, which hold it against the
// ledger; nothing depends on it.
#pragma once

#include <cstdint>
#include <string>

namespace ringspan::binding {

struct Traffic {
  int64_t messages = 0;  // a collective counts as one
  int64_t bytes = 0;     // to other ranks
};

void count_posted(const std::string& group_name, int64_t bytes);
Traffic traffic_of(const std::string& group_name);  // since the process began

}  // namespace ringspan::binding
