#include "ringspan/shard/named_map.h"

namespace ringspan {

std::optional<ShardMap> shard_map_named(std::string_view name, const MaskSpec& mask, int64_t seq_len, int64_t world) {
  if (name == "contiguous") return ShardMap::contiguous(seq_len, world);
  if (name == "head_tail") return ShardMap::head_tail(seq_len, world);
  if (name == "striped") return ShardMap::striped(seq_len, world);
  if (name == "balanced") return ShardMap::balanced(mask, world);
  return std::nullopt;
}

}  // namespace ringspan
