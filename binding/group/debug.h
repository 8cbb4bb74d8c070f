// Debug mode, RINGSPAN_DEBUG=1 on every rank: calls are compared by the place in the program that made them, and what
// must be equal on all ranks by its content.
#pragma once

#include <cstdlib>
#include <string_view>

namespace ringspan::binding {

inline bool is_debugged() {
  const char* value = std::getenv("RINGSPAN_DEBUG");
  return value && std::string_view(value) == "1";
}

}  // namespace ringspan::binding
