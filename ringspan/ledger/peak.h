// The most memory that a pass holds at once (PassLedger::peak_bytes): a walk over its steps with the book of slots that
// the stores keep (plan/slot_book.h).
#pragma once

#include <cstdint>

#include "ringspan/plan/exchange.h"
#include "ringspan/plan/plan.h"

namespace ringspan::detail {

int64_t forward_peak_bytes(const RankPlan& part, Exchange exchange);
int64_t backward_peak_bytes(const RankPlan& part, Exchange exchange);

}  // namespace ringspan::detail
