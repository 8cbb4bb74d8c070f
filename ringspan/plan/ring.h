// The ring schedule: fills in the steps of one rank.
#pragma once

#include "ringspan/plan/plan.h"

namespace ringspan::detail {

// `part.rank` says whose steps; forward and backward are written. Cost: the tiles of this rank's own rows.
void build_ring(const Plan& plan, RankPlan& part);

}  // namespace ringspan::detail
