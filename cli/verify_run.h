// Verification: plans on in-process ranks against the double reference on one rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ringspan/kernel/isa.h"
#include "ringspan/plan/plan.h"
#include "ringspan/transport/transport.h"

#include "cli/verify_tensors.h"

namespace ringspan::cli {

struct Comparison {
  std::string quantity;  // "out", "lse", "dq", "dk", "dv", "dbias", "dsink"
  double error = 0;      // largest difference over the largest reference value (gradients: see GradientScales)
  double bound = 0;
  bool met() const { return error <= bound; }  // NaN is not met
};

// Gradients whose terms cancel are small beside the rounding of each term. These are the least values that a difference
// is divided by: what a rounded delta alone brings about is a few units of the dtype's rounding of them.
//     dq, dk, dbias   dS = P (dP - delta): half of the largest delta, times scale and the largest k (dq) or q (dk)
//     dsink           the sum of the absolute values that it consists of
struct GradientScales {
  double dq = 0, dk = 0, dbias = 0, dsink = 0;
};

struct Verification {
  std::vector<Comparison> comparisons;
  std::vector<std::string> plan_faults;            // of validate()
  std::vector<int64_t> sent_bytes, planned_bytes;  // by rank, forward and backward
  bool met() const;
};

// One call with random inputs, and the results of the double reference for it. `problem` is one of with_terms().
// Cost: that of the reference, one step per kept pair and element of the head dims.
class Verifier {
 public:
  Verifier(const Problem& problem, const MaskSpec& mask, const Terms& terms, uint64_t seed);

  // Runs a plan of the same problem and mask, whose maps cover both sequences.
  Verification run(const Plan& plan, int threads_per_rank) const;

  const Results& want() const { return want_; }

 private:
  Results run_rank(const Plan& plan, Transport& transport, int threads, Verification& verification) const;
  std::vector<Comparison> compare(const Results& got) const;

  Problem problem_;
  MaskSpec mask_;
  Terms terms_;
  uint64_t seed_;
  Inputs inputs_;
  GradientScales scales_;
  Results want_;
};

}  // namespace ringspan::cli
