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
int64_t sum_of_floors(int64_t count, int64_t base, int64_t step, int64_t divisor);

}  // namespace ringspan
