#pragma once

#include "ringspan/plan/plan.h"

namespace ringspan::detail {

// Global positions of a block. 768 = 4 x 192 = 8 x 96: whole query blocks of the forward and of the backward kernel
// (docs/decisions/invariant.md).
constexpr int64_t kInvariantBlock = 768;
// Blocks of a map's sequence. A pass has a step for each block that visits, and one before them.
int64_t num_invariant_blocks(const ShardMap& map);

// Error where a bias or mask of query rows cannot be put in global order.
void check_invariant(const Problem& problem, const ShardMap& q_map);

void build_invariant(const Plan& plan, RankPlan& part);

}  // namespace ringspan::detail
