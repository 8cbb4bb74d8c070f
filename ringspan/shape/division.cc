#include "ringspan/shape/division.h"

namespace ringspan {

// The sum counts the lattice points under a line. Whole steps are taken out in closed form; what is left has a slope
// below 1, and the same points counted along the other axis are a smaller sum of the same kind.
int64_t sum_of_floors(int64_t count, int64_t base, int64_t step, int64_t divisor) {
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
