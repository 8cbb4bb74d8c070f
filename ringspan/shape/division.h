// Division that rounds towards minus and plus infinity, for a positive divisor.
#pragma once

#include <cstdint>

namespace ringspan {

// The test for 1 is worth a branch: most strides are 1, and a 64-bit division costs tens of cycles.
constexpr int64_t floor_div(int64_t value, int64_t divisor) {
  if (divisor == 1) return value;
  const int64_t quotient = value / divisor;
  return quotient - (value % divisor < 0 ? 1 : 0);
}

constexpr int64_t ceil_div(int64_t value, int64_t divisor) {
  if (divisor == 1) return value;
  const int64_t quotient = value / divisor;
  return quotient + (value % divisor > 0 ? 1 : 0);
}

// Sum over k = 0 .. count-1 of floor((base + k * step) / divisor), for base, step >= 0. Cost: as Euclid's algorithm.
//
// The sum counts the lattice points under a line. Whole steps are taken out in closed form; what is left has a slope
// below 1, and the same points counted along the other axis are a smaller sum of the same kind.
constexpr int64_t sum_of_floors(int64_t count, int64_t base, int64_t step, int64_t divisor) {
  int64_t total = 0;
  while (count > 0) {
    total += (count - 1) * count / 2 * (step / divisor) + count * (base / divisor);
    step %= divisor;
    base %= divisor;
    const int64_t top = step * count + base;
    if (top < divisor) break;
    count = top / divisor;
    base = top % divisor;
    const int64_t old_step = step;
    step = divisor;
    divisor = old_step;
  }
  return total;
}

}  // namespace ringspan
