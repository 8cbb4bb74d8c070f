#include "binding/base/group.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <vector>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "binding/base/errors.h"

namespace ringspan::binding {

namespace {

// ProcessGroup::hasBackendForDeviceType, which PyTorch 2.12 lacks.
bool has_backend(const c10d::ProcessGroup& group, at::DeviceType device) {
  const std::vector<at::Device> devices = group.getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(), [&](const at::Device& one) { return one.type() == device; });
}

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

std::chrono::milliseconds Group::timeout() const {
  try {
    if (backend) return backend->getBackendOptions()->timeout;
  } catch (const c10::Error&) {
    // Not every backend tells its options.
  }
  return kBackendDefaultTimeout;
}

Group find_group(const std::string& name, std::optional<at::DeviceType> wanted) {
  Group group;
  group.name = name;
  if (name.empty()) return group;
  try {
    group.process_group = c10d::resolve_process_group(name);
  } catch (const c10::Error& error) {
    throw Error(concat("group: no process group is named \"", name, "\" (", error.what_without_backtrace(), ")"));
  }
  group.rank = group.process_group->getRank();
  group.size = group.process_group->getSize();
  if (group.process_group->hasBackends()) {
    const bool has_cpu = has_backend(*group.process_group, at::kCPU);
    const at::DeviceType device =
        wanted.value_or(has_cpu ? at::kCPU : group.process_group->getDeviceTypes().front().type());
    group.device = device;
    RINGSPAN_CHECK(has_backend(*group.process_group, device), "group: \"", name, "\" has no backend for ",
                   at::DeviceTypeName(device, /*lower_case=*/true), " tensors; make it with ",
                   device == at::kCPU ? "gloo" : "the backend of that device");
    group.backend = group.process_group->getBackend(device);
    group.backend_name = group.backend->getBackendName();
  } else {
    group.backend_name = group.process_group->getBackendName();
  }
  return group;
}

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

Share share_of(const std::optional<c10::List<std::string>>& group_names) {
  Share share;
  if (!group_names) return share;
  for (size_t i = 0; i < group_names->size(); ++i) {
    const Group group = find_group(group_names->get(i));
    share = {share.index * group.size + group.rank, share.count * group.size};
  }
  return share;
}

}  // namespace ringspan::binding
