// The schedules "ulysses" and "hybrid": ranks of a team split heads instead of rows while they compute, and between
// teams K/V go round.
#pragma once

#include "ringspan/plan/builder.h"

namespace ringspan::detail {

// `team_size` divides the number of ranks: all of them for "ulysses".
void build_ulysses(const Plan& plan, RankPlan& part, int64_t team_size);

// The query heads of place `place` among `team_size`, with the KV heads that they read. Query heads are split evenly;
// KV heads that serve the heads of several places go to each of them.
std::vector<HeadBlock> heads_of_place(const Problem& problem, int64_t place, int64_t team_size);

}  // namespace ringspan::detail
