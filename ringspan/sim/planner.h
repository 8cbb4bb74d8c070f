// planner: which schedule, shard map and mesh to run a call with on a machine. It simulates every candidate and says
// why the best one is the best; what does not fit in memory is refused.
//
//     rank mesh of 8 ranks, tensor parallel 2: heads are split over neighbours, the sequence over the four columns
//               CP 0   CP 1   CP 2   CP 3
//     TP 0       0      2      4      6
//     TP 1       1      3      5      7
//
// Schedules hybrid:U are the other 2-D split: U ranks split heads, teams of U split the sequence.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ringspan/sim/simulate.h"

namespace ringspan {

struct Candidate {
  Schedule schedule = Schedule::kRing;
  std::string shard{};  // the name of the map
  int64_t tensor_parallel = 1;
  double forward_seconds = 0, backward_seconds = 0;  // tensor parallel traffic included
  double tensor_parallel_seconds = 0;                // of both passes: activations gathered and scattered
  double exposed_seconds = 0;                        // both passes, mean over ranks
  double idle_seconds = 0;
  int64_t memory_bytes = 0;
  std::string refused{};  // why it cannot run; empty: it can

  double seconds() const { return forward_seconds + backward_seconds; }
};

struct PlannerQuestion {
  Problem problem;
  MaskSpec mask;
  int64_t world = 1;  // all ranks, those of tensor parallelism too
  Exchange exchange = Exchange::kAllToAll;
  bool backward = true;  // whether backward counts
  // What to choose from; empty: all that make sense. Shards: contiguous, head_tail, striped, balanced.
  std::vector<Schedule> schedules{};
  std::vector<std::string> shards{};
  std::vector<int64_t> tensor_parallel{1};
};

struct Choice {
  std::vector<Candidate> candidates;  // fastest first, those that are refused at the end
  std::string reason;                 // of the first one, in a sentence or two

  bool is_found() const { return !candidates.empty() && candidates.front().refused.empty(); }
};

// `progress(done, all)` is called after every candidate.
Choice choose_plan(const PlannerQuestion& question, const Machine& machine,
                   const std::function<void(int64_t, int64_t)>& progress = {});

// {"reason":, "candidates": [{"schedule":, "shard":, "tensor_parallel":, "seconds":, ...}]}
std::string to_json(const Choice& choice);

}  // namespace ringspan
