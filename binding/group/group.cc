#include "binding/group/group.h"

#include <algorithm>
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
