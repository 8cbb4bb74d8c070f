// The empty row, which keeps no key: out 0, max -inf, sum 0, lse -inf. Constants alone, since the kernels of every
// instruction set include this.
#pragma once

namespace ringspan {

constexpr double kEmptyRowMax = -__builtin_inf();  // and lse
constexpr double kEmptyRowSum = 0;                 // and out

}  // namespace ringspan
