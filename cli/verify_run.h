// One verification: a plan on in-process ranks against the double reference on one rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ringspan/kernel/isa.h"
#include "ringspan/plan/plan.h"

namespace ringspan::cli {

struct Comparison {
  std::string quantity;  // "out", "lse", "dq", "dk", "dv"
  double error = 0;      // largest difference over the largest reference value
  double bound = 0;
  bool met() const { return error <= bound; }  // NaN is not met
};

struct Verification {
  std::vector<Comparison> comparisons;
  std::vector<std::string> plan_faults;            // of validate()
  std::vector<int64_t> sent_bytes, planned_bytes;  // by rank, forward and backward
  Isa isa = Isa::kGeneric;
  bool met() const;
};

// The maps of the plan must cover both sequences. Inputs are standard normal, rounded to the problem's dtype, from
// `seed`. Cost: that of the reference, one step per kept pair and element of the head dims.
Verification verify(const Plan& plan, uint64_t seed, int threads_per_rank);

}  // namespace ringspan::cli
