// The algebra of softmax_state.h for one row: every sum of two parts of a row that the kernels form goes through here.
// Scalars only; what becomes of o is told as a factor.
//
// Legend: m maximum of a row's scaled scores, l sum of e^(score - m), o unnormalised output.
#pragma once

#include "ringspan/kernel/simd-inl.h"
#include "ringspan/softmax/empty_row.h"

namespace ringspan::RINGSPAN_ISA_NAMESPACE {

template <class Acc>
constexpr Acc kEmptyMax = static_cast<Acc>(kEmptyRowMax);

template <class Acc>
RINGSPAN_INLINE Acc joint_max(Acc m, Acc part) {
  return part > m ? part : m;
}

// What the scores of a row are measured from. A row of -inf only (an infinite input, or nothing kept) is measured from
// 0, which avoids inf - inf.
template <class Acc>
RINGSPAN_INLINE Acc reference_of(Acc m) {
  return m == kEmptyMax<Acc> ? Acc{0} : m;
}

// What the o of two parts are multiplied with to form that of both.
template <class Acc>
struct PartFactors {
  Acc into, part;
};

// (m, l) = (m, l) + (part_m, part_l).
template <class Acc>
RINGSPAN_INLINE PartFactors<Acc> join_part(Acc& m, Acc& l, Acc part_m, Acc part_l) {
  const Acc joint = joint_max(m, part_m), reference = reference_of(joint);
  const PartFactors<Acc> factors{exp(splat(m - reference))[0], exp(splat(part_m - reference))[0]};
  m = joint;
  l = l * factors.into + part_l * factors.part;
  return factors;
}

// (m, l) = (m, l) + a sink: one more key, whose value is 0. Returns the factor of o. Once a row, so at full precision.
template <class Acc>
RINGSPAN_INLINE Acc join_sink(Acc& m, Acc& l, Acc sink) {
  const Acc joint = joint_max(m, sink);
  if (joint == kEmptyMax<Acc>) return 1;
  const auto weight = [joint](Acc score) {
    return static_cast<Acc>(__builtin_exp(static_cast<double>(score - joint)));
  };
  const Acc keep = l == 0 ? Acc{0} : weight(m);
  l = l * keep + weight(sink);
  m = joint;
  return keep;
}

// What a finished row hands out: out = o * factor.
template <class Acc>
struct FinishedRow {
  Acc max, sum, lse, factor;
};

// `keep`: a factor that o still lacks. Divides once.
template <class Acc>
RINGSPAN_INLINE FinishedRow<Acc> finish_row(Acc m, Acc l, Acc keep) {
  if (l == 0) return {kEmptyMax<Acc>, l, kEmptyMax<Acc>, 0};
  return {m, l, static_cast<Acc>(static_cast<double>(m) + __builtin_log(static_cast<double>(l))), keep / l};
}

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
