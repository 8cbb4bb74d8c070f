// Shard maps by name, for those who choose among them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "ringspan/shard/shard_map.h"

namespace ringspan {

// "contiguous", "head_tail", "striped", or "balanced", by the mask; nothing for another name.
std::optional<ShardMap> shard_map_named(std::string_view name, const MaskSpec& mask, int64_t seq_len, int64_t world);

}  // namespace ringspan
