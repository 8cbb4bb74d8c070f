// The schedule "gather".
#pragma once

#include "ringspan/plan/builder.h"

namespace ringspan::detail {

void build_gather(const Plan& plan, RankPlan& part);

}  // namespace ringspan::detail
