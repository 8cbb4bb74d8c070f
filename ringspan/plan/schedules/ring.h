// The ring of teams: that of "ring" and "q_ring" with teams of one rank, and the one that "hybrid" has inside.
#pragma once

#include <functional>
#include <vector>

#include "ringspan/plan/schedules/builder.h"

namespace ringspan::detail {

// Teams that each hold a buffer of one side (queries, or keys and values) and pass it round. What goes round is split
// among the ranks of a team by heads, so a rank meets one rank of every other team. A plain ring has teams of one rank.
struct Ring {
  enum class Side { kQ, kKv };

  int64_t size = 1, index = 0;                 // teams, and this rank's
  int64_t first_step = 0;                      // in the plan
  Side visitors = Side::kKv;                   // what goes round; the other side stays
  std::vector<int64_t> rows{};                 // of each team's buffer
  Operand own{}, staying{};                    // this rank's buffers; visitors use the slots after own.slot
  std::vector<Payload> inputs{}, gradients{};  // that go round; no gradients in forward
  std::function<int64_t(int64_t team)> rank_of{};
  std::function<std::vector<Tile>(int64_t team)> tiles_with{};
};

// Appends the ring's steps: one for each team.
void append_ring(const RankPlan& part, const Ring& ring, std::vector<Step>& steps);

}  // namespace ringspan::detail
