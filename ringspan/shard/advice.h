// Whether another split would share the work out better than the default one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "ringspan/mask/mask_spec.h"
#include "ringspan/shard/shard_map.h"

namespace ringspan {

struct MapAdvice {
  std::string map;           // "head_tail" or "balanced", as map_kinds.h knows them
  int64_t busiest = 0;       // kept pairs of the busiest rank, all batch entries of the mask added up
  int64_t busiest_then = 0;  // the same under head_tail; under balanced at most so many
};

// What another split would save: for self attention (queries and keys both split by `contiguous`, one list for all
// batch entries), the map under which the busiest rank would have less than five sixths of the work that it has now:
// head_tail where that is enough, else balanced where that is. Nothing where neither is, where the mask's q_len and
// kv_len differ, where there are fewer than 64 rows a rank, or where `contiguous` is no ShardMap::contiguous.
// Cost: two counts for each rank and one for each band, at 14 ns each; where balanced is asked, 2 ms on 64 ranks. It is
// not asked for more than 2^20 positions and rows of bands, and for few chunks a rank only, so that work in a handful
// of rows is not always told.
std::optional<MapAdvice> better_map(const MaskSpec& mask, const ShardMap& contiguous);

}  // namespace ringspan
