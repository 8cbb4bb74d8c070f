// simulate: how long a plan takes on a machine, step by step and rank by rank, without running it.
//
// A model, not a measurement: kernels are flops and rows, messages are latency and bytes (machine.h), ranks do what
// the ring loop does in that order (engine.h). docs/simulator.md says how far it was from measured runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ringspan/plan/exchange.h"
#include "ringspan/plan/plan.h"
#include "ringspan/sim/engine.h"
#include "ringspan/sim/machine.h"

namespace ringspan {

struct SimulatedPass {
  double seconds = 0;          // until the last rank is done, the call's fixed cost included
  double compute_seconds = 0;  // mean over ranks
  double exposed_seconds = 0;  // mean over ranks: waiting for messages, and copying
  double idle_seconds = 0;     // mean over ranks: done before the last one
  int64_t slowest_rank = 0;    // that is done last
  std::vector<detail::RankTimes> ranks{};
};

struct Simulation {
  SimulatedPass forward{}, backward{};
  int64_t memory_bytes = 0;  // of the rank that holds the most: the tensors of the call and what it allocates
  int64_t memory_rank = 0;
  int64_t ranks_built = 0;  // fewer than the world: the others are estimated from them
  bool fits = true;         // in the machine's memory_bytes, where these are known

  double seconds() const { return forward.seconds + backward.seconds; }
};

struct SimulateOptions {
  Exchange exchange = Exchange::kAllToAll;
  // Worlds of more ranks are estimated from about this many, spread evenly.
  int64_t most_ranks_built = 16;
  std::vector<int64_t> steps_of{};  // ranks whose steps are kept (RankTimes::steps)
};

// The plan's grad_route must be that of the exchange (route_of). Uses every processor of this machine.
Simulation simulate(const Plan& plan, const Machine& machine, const SimulateOptions& options = {});

// {"seconds":, "forward": {"seconds":, "compute_seconds":, ..., "ranks": [...]}, "backward": ..., "memory_bytes":, ...}
std::string to_json(const Simulation& simulation);

// Chrome's trace event format, which Perfetto opens: a process for each pass, a thread for each rank whose steps
// are kept, an event for each computation and each wait.
std::string chrome_trace(const Simulation& simulation);

}  // namespace ringspan
