// PassCost: one rank's pass of a plan in seconds and bytes, for one machine; what the engine plays.
#pragma once

#include <cstdint>
#include <vector>

#include "ringspan/plan/exchange.h"
#include "ringspan/plan/plan.h"
#include "ringspan/sim/machine.h"

namespace ringspan::detail {

struct PeerBytes {
  int64_t peer = 0, sent = 0, received = 0;
  bool operator==(const PeerBytes&) const = default;
};

// One Post (plan/exchange.h): what is packed before it leaves, and what moves to its place once it has come.
struct PostCost {
  int64_t needed_after = 0;  // that many steps behind its own
  bool gradients = false;
  double pack_seconds = 0, unpack_seconds = 0;
  std::vector<PeerBytes> peers{};
  bool operator==(const PostCost&) const = default;
};

struct StepCost {
  bool computes = false;
  // Gradients that arrive are needed before the tiles are computed; else after.
  bool adds_in_place = false;
  double seconds = 0;
  double copy_before_seconds = 0, copy_after_seconds = 0;  // from slot to slot, nobody else takes part
  std::vector<PostCost> before{}, after{};                 // every rank has as many, in the same order
  bool operator==(const StepCost&) const = default;
};

// Most steps of a large ring are alike: each kind is kept once, where thousands of ranks find it in the cache.
class PassCost {
 public:
  int64_t num_steps() const { return std::ssize(kind_of_); }
  const StepCost& step(int64_t index) const { return kinds_[kind_of_[index]]; }
  void add(StepCost cost);

 private:
  std::vector<StepCost> kinds_{};
  std::vector<size_t> kind_of_{};  // of each step
};

struct RankCost {
  PassCost forward{}, backward{};
  int64_t memory_bytes = 0;  // most that the rank holds in either pass: the caller's tensors and the call's
};

// `keeps_silent_peers`: those too with whom nothing is exchanged; else they are left out.
RankCost cost_of(const RankPlan& part, Exchange exchange, const Machine& machine, bool keeps_silent_peers);

}  // namespace ringspan::detail
