#include "binding/group/job.h"

#include <atomic>
#include <chrono>
#include <cstdlib>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "ringspan/base/error.h"

namespace ringspan::binding {
namespace {

using Clock = std::chrono::steady_clock;

// The name that torch.distributed gives to the group of init_process_group.
constexpr const char* kDefaultGroup = "0";
// An unknown name costs an exception, so it is not asked for again at once. Making a group takes longer than this.
constexpr Clock::duration kAskAgain = std::chrono::milliseconds(1);

// Ranks of the default group; 0 = there is none.
int64_t size_of_default_group() {
  static std::atomic<Clock::rep> missed_at = Clock::duration::min().count();
  const Clock::rep now = Clock::now().time_since_epoch().count();
  const Clock::rep missed = missed_at.load(std::memory_order_relaxed);
  if (missed > 0 && now - missed < kAskAgain.count()) return 0;
  try {
    return c10d::resolve_process_group(kDefaultGroup)->getSize();
  } catch (const std::exception&) {
    missed_at.store(now, std::memory_order_relaxed);
    return 0;
  }
}

// 1 where the two variables of a launcher are not there, or hold no numbers.
int64_t size_of_launch() {
  const char* size = std::getenv("WORLD_SIZE");
  if (!size || !std::getenv("RANK")) return 1;
  const int64_t ranks = std::atoll(size);
  return ranks > 1 ? ranks : 1;
}

}  // namespace

int64_t job_size() {
  const int64_t ranks = size_of_default_group();
  return ranks > 0 ? ranks : size_of_launch();
}

void check_alone(const char* what) {
  const int64_t ranks = job_size();
  RINGSPAN_CHECK(
      ranks == 1, "group is None in a job of ", ranks, " processes: ", what,
      " would see this process's part alone. Give group=, or group=ringspan.LOCAL where this process alone is "
      "meant");
}

}  // namespace ringspan::binding
