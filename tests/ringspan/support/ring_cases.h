// What the tests of whole calls share: masks with their rules, maps by name, and the judgement of a run by the oracle.
#pragma once

#include "tests/ringspan/support/oracle.h"
#include "tests/ringspan/support/ring_run.h"

namespace ringspan::test {

struct MaskCase {
  const char* name;
  MaskSpec mask;
  Keep keep;
};

struct MapCase {
  const char* name;
  ShardMap map;
};

// The call as the oracle knows it; looks at `inputs`.
Inputs oracle_inputs(const Problem& problem, const RingInputs& inputs, const Keep& keep);

struct Expected {
  Outputs outputs;
  Gradients gradients;
  Array dbias;  // of the bias's shape
};
Expected expected_of(const Problem& problem, const RingInputs& inputs, const Keep& keep);

// Largest errors, as gtest expectations: of out and the statistics, and of the gradients.
void expect_close(const RingResults& got, const Expected& want, double forward_bound, double gradient_bound);

// Everything that a call returns against the oracle, within what the dtype itself causes: relative to the largest value
// and to the size of the terms that a gradient is a sum of.
void expect_exact(const Problem& problem, const RingInputs& inputs, const Keep& keep, const RingResults& got);

}  // namespace ringspan::test
