// The most memory that a pass holds at once (PassLedger::peak_bytes): the steps are followed, and what a Store would
// allocate and free is added up.
#pragma once

#include <cstdint>
#include <optional>

#include "ringspan/plan/exchange.h"
#include "ringspan/plan/plan.h"

namespace ringspan::detail {

int64_t forward_peak_bytes(const RankPlan& part, std::optional<Exchange> exchange);
int64_t backward_peak_bytes(const RankPlan& part, std::optional<Exchange> exchange);

}  // namespace ringspan::detail
