// The builders of the schedules: each fills one rank's part of a plan with its steps. A schedule's own file opens with
// a worked grid, its messages and its bytes; plan/schedule.cc has the table that names them.
#pragma once

#include <cstdint>
#include <vector>

#include "ringspan/plan/plan.h"

namespace ringspan::detail {

// By the builder of the plan's schedule.
void build_steps(const Plan& plan, RankPlan& part);

void build_ring(const Plan& plan, RankPlan& part);
void build_q_ring(const Plan& plan, RankPlan& part);
void build_gather(const Plan& plan, RankPlan& part);
void build_pruned(const Plan& plan, RankPlan& part);
// Nodes of `schedule().inner` ranks.
void build_double_ring(const Plan& plan, RankPlan& part);

// Ranks of a team split heads instead of rows while they compute; between teams K/V go round. One team of all ranks;
// teams of `schedule().inner` ranks.
void build_ulysses(const Plan& plan, RankPlan& part);
void build_hybrid(const Plan& plan, RankPlan& part);
// The query heads of place `place` among `team_size`, with the KV heads that they read. Query heads are split evenly;
// KV heads that serve the heads of several places go to each of them.
std::vector<HeadBlock> heads_of_place(const Problem& problem, int64_t place, int64_t team_size);

void build_invariant(const Plan& plan, RankPlan& part);
// Global positions of a block. 768 = 4 x 192 = 8 x 96: whole query blocks of the forward and of the backward kernel
// (docs/decisions/invariant.md).
constexpr int64_t kInvariantBlock = 768;
// Blocks of a map's sequence. A pass has a step for each block that visits, and one before them.
int64_t num_invariant_blocks(const ShardMap& map);
// Error where a bias or mask of query rows cannot be put in global order.
void check_invariant(const Problem& problem, const ShardMap& q_map);

}  // namespace ringspan::detail
