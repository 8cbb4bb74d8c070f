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

// What changes single pairs: s = cap tanh(scale q.k / cap) + bias, without the pair where the bias is -inf; dropped
// pairs weigh 0, the others 1 / (1 - p), in the sum over the values only. Absent functions = nothing.
struct PairTerms {
  double softcap = 0;  // 0 = none
  std::function<double(int64_t b, int64_t n, int64_t i, int64_t j)> bias{};
  std::function<bool(int64_t b, int64_t n, int64_t i, int64_t j)> is_dropped{};
  double dropout_p = 0;
};

struct Inputs {
  Array q, k, v;  // [B, N, Sq, Dqk], [B, Nkv, Skv, Dqk], [B, Nkv, Skv, Dv]
  double scale = 1;
  Keep keep;
  PairTerms terms{};
  std::vector<double> sink{};  // one score per query head that joins every row with no value; empty = none
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
  Array ds;     // [B, N, Sq, Skv], gradient of the scores, cap and bias included
  std::vector<double> dsink{};
};
// `dlse` may have size 0: then it counts as 0.
Gradients oracle_backward(const Inputs& inputs, const Outputs& outputs, const Array& dout, const Array& dlse = {});

// How far an honest kernel strays that rounds P (unnormalised, e^(s - max)) and dS to `dtype` to feed them to the
// second products, and nothing else: the oracle once more with just these roundings. RMS over all elements.
struct HonestErrors {
  double out = 0, dq = 0, dk = 0, dv = 0;
};
HonestErrors honest_errors(const Inputs& inputs, const Outputs& outputs, const Gradients& gradients, const Array& dout,
                           DType dtype);

}  // namespace ringspan::test
