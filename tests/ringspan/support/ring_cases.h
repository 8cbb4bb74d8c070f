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

struct Expected {
  Outputs outputs;
  Gradients gradients;
};
Expected expected_of(const Problem& problem, const RingInputs& inputs, const Keep& keep);

// Largest errors, as gtest expectations: of out and the statistics, and of the gradients.
void expect_close(const RingResults& got, const Expected& want, double forward_bound, double gradient_bound);

}  // namespace ringspan::test
