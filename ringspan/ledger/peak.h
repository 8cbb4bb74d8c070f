// The most memory that a pass holds at once (PassLedger::peak_bytes): the steps are followed, and what a Store would
// allocate and free is added up.
#pragma once

#include <cstdint>
#include <optional>

#include "ringspan/plan/exchange.h"
#include "ringspan/plan/plan.h"

namespace ringspan::detail {

// What an all_gather takes from each rank of K or of V: as many rows as the longest shard has.
int64_t padded_shard_bytes(const RankPlan& part, Payload payload);

int64_t forward_peak_bytes(const RankPlan& part, std::optional<Exchange> exchange);
int64_t backward_peak_bytes(const RankPlan& part, std::optional<Exchange> exchange);

}  // namespace ringspan::detail
