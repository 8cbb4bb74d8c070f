#include "binding/op/map_warning.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "ringspan/shard/advice.h"

namespace ringspan::binding {
namespace {

// Looking at a mask costs up to milliseconds, so it is done for few.
constexpr size_t kMostLooks = 32;

}  // namespace

void warn_of_map(uint64_t pattern, const std::function<Decoded()>& decoded) {
  static std::mutex mutex;
  static std::vector<uint64_t> seen;
  static bool has_warned = false;
  {
    const std::lock_guard lock(mutex);
    if (has_warned || seen.size() >= kMostLooks || std::ranges::find(seen, pattern) != seen.end()) return;
    seen.push_back(pattern);
  }
  const Decoded call = decoded();
  const std::optional<MapAdvice> advice = better_map(call.mask, call.q_map);
  if (!advice) return;
  {
    const std::lock_guard lock(mutex);
    if (std::exchange(has_warned, true)) return;
  }
  TORCH_WARN("ringspan: without a shard_map the ", call.world, " ranks hold contiguous parts of the ", call.q_len,
             " positions, and the busiest computes ", advice->busiest, " pairs of query and key for each head; with ",
             "ringspan.ShardMap.", advice->map, " it would be ", advice->busiest_then,
             ". Give shard_map= (any map silences this), and shard the tensors with it");
}

}  // namespace ringspan::binding
