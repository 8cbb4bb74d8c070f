#include "binding/group.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "binding/errors.h"

namespace ringspan::binding {

std::chrono::milliseconds Group::timeout() const {
  try {
    if (backend) return backend->getBackendOptions()->timeout;
  } catch (const c10::Error&) {
    // Not every backend tells its options.
  }
  return kBackendDefaultTimeout;
}

Group find_group(const std::string& name) {
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
    RINGSPAN_CHECK(group.process_group->hasBackendForDeviceType(at::kCPU), "group: \"", name,
                   "\" has no backend for CPU tensors; make it with gloo");
    group.backend = group.process_group->getBackend(at::kCPU);
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
