// SoftmaxState: attention over a part of the keys, in a form that can be joined with other parts.
// Per query row: m = max of the scaled scores, l = sum exp(score - m), acc = sum exp(score - m) * v (not divided).
// Identity (-inf, 0, 0); the join is associative and commutative up to rounding:
//     m = max(m1, m2),   l = l1 e^(m1-m) + l2 e^(m2-m),   acc likewise      (Milakov & Gimelshein 2018, online softmax)
// A sink is one more key, whose value is 0; it joins once, where the row ends. There out = acc / l and lse = m + ln l,
// or, with l = 0, the empty row (empty_row.h). attend() begins, joins and finishes states, by kernel/softmax-inl.h.
#pragma once

#include "ringspan/softmax/empty_row.h"
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

}  // namespace ringspan
