#include "tests/ringspan/support/ring_cases.h"

#include <gtest/gtest.h>

namespace ringspan::test {

Expected expected_of(const Problem& p, const RingInputs& in, const Keep& keep) {
  const Inputs inputs{in.q, in.k, in.v, p.scale, keep};
  Expected expected{oracle_forward(inputs), {}};
  expected.gradients = oracle_backward(inputs, expected.outputs, in.dout, in.dlse);
  return expected;
}

void expect_close(const RingResults& got, const Expected& want, double forward_bound, double gradient_bound) {
  EXPECT_LE(max_error(got.out, want.outputs.out), forward_bound);
  EXPECT_LE(max_error(got.lse, want.outputs.lse), forward_bound);
  EXPECT_LE(max_error(got.max, want.outputs.max), forward_bound);
  EXPECT_LE(max_error(got.sum, want.outputs.sum), forward_bound);
  EXPECT_LE(max_error(got.dq, want.gradients.dq), gradient_bound);
  EXPECT_LE(max_error(got.dk, want.gradients.dk), gradient_bound);
  EXPECT_LE(max_error(got.dv, want.gradients.dv), gradient_bound);
}

}  // namespace ringspan::test
