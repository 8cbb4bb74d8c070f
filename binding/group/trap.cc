#include "binding/group/trap.h"

#include <mutex>
#include <stdexcept>

#include <c10/util/Exception.h>
#include <signal.h>

#include "ringspan/base/error.h"

namespace ringspan::binding {
namespace {

struct Trap {
  std::mutex mutex;
  int64_t place = -1, reached = 0;
  std::string what;
};

Trap& trap() {
  static auto& trap = *new Trap;
  return trap;
}

}  // namespace

void set_trap(int64_t place, const std::string& what) {
  RINGSPAN_CHECK(what.empty() || what == "kill" || what == "stop" || what == "throw" || what == "memory", "what is \"",
                 what, "\"; give kill, stop, throw, memory or nothing");
  const std::lock_guard lock(trap().mutex);
  trap().place = place;
  trap().reached = 0;
  trap().what = what;
}

int64_t num_places() {
  const std::lock_guard lock(trap().mutex);
  return trap().reached;
}

void spring_trap() {
  std::string what;
  {
    const std::lock_guard lock(trap().mutex);
    if (trap().reached++ == trap().place) what.swap(trap().what);
  }
  if (what == "kill") raise(SIGKILL);
  if (what == "stop") raise(SIGSTOP);
  if (what == "throw") throw std::runtime_error("trapped");
  if (what == "memory") C10_THROW_ERROR(OutOfMemoryError, "trapped: no memory");
}

}  // namespace ringspan::binding
