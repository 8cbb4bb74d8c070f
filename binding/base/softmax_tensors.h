// The algebra of ringspan/softmax/softmax_state.h on tensors, for outputs that are divided by their sum already:
//
//     m = max(m1, m2)    a1 = l1 e^(m1 - m)    a2 = l2 e^(m2 - m)    l = a1 + a2    out = out1 a1/l + out2 a2/l
#pragma once

#include <ATen/core/Tensor.h>

namespace ringspan::binding {

// max and sum of two parts together, and the shares a1/l and a2/l of their outputs; all of one shape, that of the
// arguments broadcast.
struct JoinedParts {
  at::Tensor max, sum, share, part_share;
};

// An empty part is (-inf, 0) and has no share; two of them are empty. On any device; waits for none. Also the op
// ringspan::_join_softmax, for the steps of accelerators.
JoinedParts join_parts(const at::Tensor& max, const at::Tensor& sum, const at::Tensor& part_max,
                       const at::Tensor& part_sum);

}  // namespace ringspan::binding
