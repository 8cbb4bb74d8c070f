// The oracle: dense attention in double over all S x S scores, with analytic gradients. It shares no code with the
// product: the mask is a predicate, the arrays are its own, and its gradients are checked against finite differences
// (kernel/oracle_test.cc).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tests/ringspan/support/array.h"

namespace ringspan::test {

// True where query row i takes part with key row j in batch entry b.
using Keep = std::function<bool(int64_t b, int64_t i, int64_t j)>;

struct Inputs {
  Array q, k, v;  // [B, N, Sq, Dqk], [B, Nkv, Skv, Dqk], [B, Nkv, Skv, Dv]
  double scale = 1;
  Keep keep;
};

struct Outputs {
  Array out;            // [B, N, Sq, Dv]; empty rows 0
  Array max, sum, lse;  // [B, N, Sq, 1]; empty rows -inf, 0, -inf
  Array p;              // [B, N, Sq, Skv], the softmax
};
Outputs oracle_forward(const Inputs& inputs);

struct Gradients {
  Array dq, dk, dv;
  Array delta;  // sum_d out * dout - dlse, [B, N, Sq, 1]
  Array ds;     // [B, N, Sq, Skv], gradient of the scaled scores
};
// `dlse` may have size 0: then it counts as 0.
Gradients oracle_backward(const Inputs& inputs, const Outputs& outputs, const Array& dout, const Array& dlse = {});

// How far an honest kernel may stray that rounds P and dS to a dtype of relative rounding error `unit` (RMS) before
// the second products, and nothing else: errors of independent roundings add up as squares,
//     out:  unit |P| * |v|        dv: unit |P|^T * |dout|        dq: scale unit |dS| * |k|     dk: scale unit |dS|^T * |q|
// where the products are taken over squares and the root of the result is meant. Each is the RMS over all elements.
struct HonestErrors {
  double out = 0, dq = 0, dk = 0, dv = 0;
};
HonestErrors honest_errors(const Inputs& inputs, const Outputs& outputs, const Gradients& gradients,
                           const Array& dout, double unit);

}  // namespace ringspan::test
