// SoftmaxState: attention over a part of the keys, in a form that can be joined with other parts.
// Per query row: m = max of the scaled scores, l = sum exp(score - m), acc = sum exp(score - m) * v (not divided).
// Identity (-inf, 0, 0); the merge is associative and commutative up to rounding:
//     m = max(m1, m2),   l = l1 e^(m1-m) + l2 e^(m2-m),   acc likewise      (Milakov & Gimelshein 2018, online softmax)
// The empty row is defined here and nowhere else: out 0, max -inf, sum 0, lse -inf.
#pragma once

#include <cstdint>
#include <vector>

#include "ringspan/base/dtype.h"
#include "ringspan/view/tensor_view.h"

namespace ringspan {

// m, l [batch, heads, rows] and acc [batch, heads, rows, v_dim], all in the accumulator type. Does not own.
struct SoftmaxState {
  TensorView max, sum, acc;
};

// What a finished row hands out.
struct OutputView {
  TensorView out;            // [batch, heads, rows, v_dim], the call's dtype
  TensorView max, sum, lse;  // [batch, heads, rows], accumulator type; natural logarithm
};

// A state that owns its memory, all rows at the identity.
class OwnedSoftmaxState {
 public:
  OwnedSoftmaxState(DType accumulator, int64_t batch, int64_t heads, int64_t rows, int64_t v_dim);
  const SoftmaxState& state() const { return state_; }

 private:
  std::vector<std::byte> storage_;
  SoftmaxState state_;
};

void set_identity(const SoftmaxState& state);
// into = into + part
void merge(const SoftmaxState& part, const SoftmaxState& into);
// One more key for every row: its score is its head's `sink` ([1, heads, 1, 1], accumulator type), its value 0.
void add_sink(const ConstTensorView& sink, const SoftmaxState& state);
// out = acc / l, lse = m + ln l; the empty row as above.
void finish(const SoftmaxState& state, const OutputView& output);

}  // namespace ringspan
