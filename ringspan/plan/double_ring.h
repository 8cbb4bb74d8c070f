// The schedule "double_ring".
#pragma once

#include "ringspan/plan/builder.h"

namespace ringspan::detail {

// `node_size` divides the number of ranks.
void build_double_ring(const Plan& plan, RankPlan& part, int64_t node_size);

}  // namespace ringspan::detail
