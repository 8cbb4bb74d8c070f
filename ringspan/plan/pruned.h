// The schedule "pruned".
#pragma once

#include "ringspan/plan/builder.h"

namespace ringspan::detail {

void build_pruned(const Plan& plan, RankPlan& part);

}  // namespace ringspan::detail
