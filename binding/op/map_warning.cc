#include "binding/op/map_warning.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include <c10/util/Exception.h>

#include "ringspan/shard/advice.h"

namespace ringspan::binding {
namespace {

// Looking at a mask costs up to milliseconds, so it is done for few.
constexpr size_t kMostLooks = 32;

// Whether a pattern is to be looked at: a new one, while nobody was warned.
class Looks {
 public:
  bool take(uint64_t pattern) {
    const std::lock_guard lock(mutex_);
    if (has_warned_ || seen_.size() >= kMostLooks) return false;
    if (std::find(seen_.begin(), seen_.end(), pattern) != seen_.end()) return false;
    seen_.push_back(pattern);
    return true;
  }

  // True for the first who asks.
  bool warn() {
    const std::lock_guard lock(mutex_);
    return !std::exchange(has_warned_, true);
  }

 private:
  std::mutex mutex_;
  std::vector<uint64_t> seen_;
  bool has_warned_ = false;
};

}  // namespace

void warn_of_map(uint64_t pattern, const std::function<Decoded()>& decoded) {
  static Looks looks;
  if (!looks.take(pattern)) return;
  const Decoded call = decoded();
  const std::optional<MapAdvice> advice = better_map(call.mask, call.q_map);
  if (!advice || !looks.warn()) return;
  TORCH_WARN("ringspan: without a shard_map the ", call.world, " ranks hold contiguous parts of the ", call.q_len,
             " positions, and the busiest computes ", advice->busiest, " pairs of query and key for each head; with ",
             "ringspan.ShardMap.", advice->map, " it would be ", advice->busiest_then,
             ". Give shard_map= (any map silences this), and shard the tensors with it");
}

}  // namespace ringspan::binding
