// The engine plays one pass of every rank against the clock. Each rank walks over its plan as the
// executor does (plan/walk.h); only the kernels and the network are replaced by seconds.
//
//     rank 0   |pack|== tiles 0 ==|wait..|== tiles 1 ==|            |...| = processor, wait = communication shows
//     link 0        |-- KV 0 > 1 -----|
//     rank 1   |pack|=== tiles 0 =====|== tiles 1 ====|
//
//   posts      A post of a rank is on its way when the rank and all its peers have posted it (as gloo's, NCCL's and
//              MPI's large messages; all ranks of the group where the machine says so). The posts of a rank go one
//              after the other; the links of a node and the network work at the same time.
//   compute    Where more ranks of a node compute than it has processors, they share them. Messages beside a
//              computation make it longer by the part of their time that `overlap` does not cover.
#pragma once

#include <cstdint>
#include <vector>

#include "ringspan/sim/pass_cost.h"
#include "ringspan/sim/sample.h"

namespace ringspan::detail {

// When one rank did what in a step, in seconds since the pass began.
struct StepTimes {
  int64_t step = 0;
  double begin = 0;                           // it waits for inputs
  double compute_begin = 0, compute_end = 0;  // equal where it computes nothing
  double end = 0;
};

struct RankTimes {
  double compute_seconds = 0;  // on the processor, sharing it included
  double copy_seconds = 0;
  double wait_seconds = 0;  // for messages
  double end = 0;
  std::vector<StepTimes> steps{};  // of the ranks for which they are kept
};

struct PassTimes {
  double seconds = 0;  // until the last rank is done
  std::vector<RankTimes> ranks{};
};

// `costs` are of the sample's ranks, in its order. RankTimes::steps are kept of the ranks `steps_of`.
PassTimes play(const Sample& sample, const std::vector<const PassCost*>& costs, const Machine& machine,
               Exchange exchange, const std::vector<int64_t>& steps_of);

}  // namespace ringspan::detail
