#include "ringspan/base/philox.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

namespace ringspan {
namespace {

using Words4 = std::array<uint32_t, 4>;
using Words2 = std::array<uint32_t, 2>;

// The known answers that the authors publish with their code (Random123, kat_vectors, philox4x32 of 10 rounds).
TEST(PhiloxTest, KnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Words4{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Words4{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words4{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(PhiloxTest, APairIsAWordOfItsCounter) {
  EXPECT_EQ(draw_of_pair(0, 0, 0), 0x6627e8d5U);
  EXPECT_EQ(draw_of_pair(0, 0, 3), 0x9b00dbd8U);
  EXPECT_EQ(draw_of_pair(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}),
            philox4x32({~0U, ~0U, ~0U, 0x3fffffff}, {~0U, ~0U})[3]);
  // offset = words 0 and 1, index / 4 = words 2 and 3, seed = the key.
  EXPECT_EQ(draw_of_pair(0x299f31d0a4093822, 0x85a308d3243f6a88, (0x0370734413198a2e << 2) + 1), 0x94fdccebU);
}

TEST(PhiloxTest, ThresholdsOfBothWaysToSayP) {
  EXPECT_EQ(keep_threshold(0.5), 0x80000000U);
  EXPECT_EQ(keep_threshold(0.25), 0xc0000000U);
  EXPECT_EQ(keep_threshold(0), 0xffffffffU);
  EXPECT_EQ(keep_threshold(1e-12), 0xffffffffU);
  EXPECT_EQ(keep_threshold(1 - 1e-12), 0U);
  for (const float keep : {0.9F, 0.8F, 0.7F, 0.35F, 0.1F, 0.999F, 0.01F}) {
    const double as_double = 1 - std::stod(std::to_string(keep));
    EXPECT_EQ(keep_threshold(as_double), keep_threshold(1.0F - keep)) << keep;
  }
}

}  // namespace
}  // namespace ringspan
