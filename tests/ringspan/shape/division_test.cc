#include "ringspan/shape/division.h"

#include <gtest/gtest.h>

namespace ringspan {
namespace {

TEST(Division, RoundsTowardsTheNamedInfinity) {
  for (int64_t value = -20; value <= 20; ++value) {
    for (int64_t divisor = 1; divisor <= 5; ++divisor) {
      EXPECT_LE(floor_div(value, divisor) * divisor, value);
      EXPECT_GT((floor_div(value, divisor) + 1) * divisor, value);
      EXPECT_GE(ceil_div(value, divisor) * divisor, value);
      EXPECT_LT((ceil_div(value, divisor) - 1) * divisor, value);
    }
  }
}

TEST(Division, SumOfFloorsIsTheSum) {
  for (int64_t count = 0; count < 8; ++count) {
    for (int64_t base = 0; base < 9; ++base) {
      for (int64_t step = 0; step < 9; ++step) {
        for (int64_t divisor = 1; divisor < 7; ++divisor) {
          int64_t sum = 0;
          for (int64_t k = 0; k < count; ++k) sum += (base + k * step) / divisor;
          ASSERT_EQ(sum_of_floors(count, base, step, divisor), sum);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringspan
