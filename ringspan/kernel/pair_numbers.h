// PairNumbers: numbers that change scores, each 0 where it is not given. A new one is a field and a row of the table
// here, its arithmetic in pairs-inl.h (change_scores), and its term in the formula of pair_inputs.h.
//
// Kernels include this: plain data only (kernel_abi.h says why).
#pragma once

namespace ringspan {

struct PairNumbers {
  double softcap;
};

// By the names of callers.
struct PairNumberInfo {
  const char* name;
  double PairNumbers::* value;
};
constexpr PairNumberInfo kPairNumbers[] = {
    {"softcap", &PairNumbers::softcap},
};

}  // namespace ringspan
