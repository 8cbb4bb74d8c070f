// Trap: for tests, what goes wrong on a rank at a place of an exchange that is known beforehand.
#pragma once

#include <cstdint>
#include <string>

namespace ringspan::binding {

// At the `place`-th place (0, 1, ...) that this process reaches from now on, in whatever group: "kill" and "stop" are
// the signals of these names, "throw" is an exception, "memory" that of memory that is not there. Once; "": never.
void set_trap(int64_t place, const std::string& what);
// Places that were reached since then.
int64_t num_places();

void spring_trap();

}  // namespace ringspan::binding
