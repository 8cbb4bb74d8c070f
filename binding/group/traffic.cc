#include "binding/group/traffic.h"

#include <mutex>
#include <unordered_map>

namespace ringspan::binding {
namespace {

struct Counts {
  std::mutex mutex;
  std::unordered_map<std::string, Traffic> by_group;
};

// Never destroyed: a call may still run while static objects go.
Counts& counts() {
  static auto& counts = *new Counts;
  return counts;
}

}  // namespace

void count_posted(const std::string& group_name, int64_t bytes) {
  const std::lock_guard lock(counts().mutex);
  Traffic& traffic = counts().by_group[group_name];
  traffic.messages += 1;
  traffic.bytes += bytes;
}

Traffic traffic_of(const std::string& group_name) {
  const std::lock_guard lock(counts().mutex);
  const auto found = counts().by_group.find(group_name);
  return found == counts().by_group.end() ? Traffic{} : found->second;
}

}  // namespace ringspan::binding
