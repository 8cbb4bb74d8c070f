#include "ringspan/base/dtype.h"

#include <bit>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"

#include "tests/ringspan/support/array.h"

namespace ringspan {
namespace {

TEST(DTypeTest, NamesParseBack) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    EXPECT_EQ(parse_dtype(name_of(dtype)), dtype);
  }
  EXPECT_EQ(size_of(DType::kF64), 8);
  EXPECT_EQ(size_of(DType::kF32), 4);
  EXPECT_EQ(size_of(DType::kBF16), 2);
  EXPECT_EQ(size_of(DType::kF16), 2);
  try {
    parse_dtype("int8");
    FAIL() << "int8 was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("int8"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("bf16"), std::string::npos);
  }
}

// Every 16-bit pattern survives the way to float and back, but for the payload of a NaN.
TEST(DTypeTest, EveryPatternSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto pattern = static_cast<uint16_t>(bits);
    const float from_bf16 = bf16_to_float(pattern);
    const float from_fp16 = fp16_to_float(pattern);
    if (std::isnan(from_bf16)) {
      ASSERT_TRUE(std::isnan(bf16_to_float(float_to_bf16(from_bf16)))) << bits;
    } else {
      ASSERT_EQ(float_to_bf16(from_bf16), pattern);
    }
    if (std::isnan(from_fp16)) {
      ASSERT_TRUE(std::isnan(fp16_to_float(float_to_fp16(from_fp16)))) << bits;
    } else {
      ASSERT_EQ(float_to_fp16(from_fp16), pattern);
    }
  }
}

TEST(DTypeTest, KnownPatterns) {
  EXPECT_EQ(bf16_to_float(0x3F80), 1.0F);
  EXPECT_EQ(bf16_to_float(0xC040), -3.0F);
  EXPECT_EQ(fp16_to_float(0x3C00), 1.0F);
  EXPECT_EQ(fp16_to_float(0xC200), -3.0F);
  EXPECT_EQ(fp16_to_float(0x7BFF), 65504.0F);
  EXPECT_EQ(fp16_to_float(0x0001), 0x1p-24F);
  EXPECT_TRUE(std::isinf(fp16_to_float(0x7C00)));
  EXPECT_TRUE(std::isnan(fp16_to_float(0x7E00)));
  EXPECT_TRUE(std::isnan(bf16_to_float(0x7FC0)));
  // A NaN whose payload lies in the low bits only must not become an infinity.
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(std::bit_cast<float>(0x7F800001u)))));
}

// A sample of all floats, and around each fp16 and bf16 value the midpoint to the next, one float to either side.
void expect_rounds_to_nearest(float value) {
  EXPECT_EQ(bf16_to_float(float_to_bf16(value)), test::rounded(value, DType::kBF16)) << std::hexfloat << value;
  EXPECT_EQ(fp16_to_float(float_to_fp16(value)), test::rounded(value, DType::kF16)) << std::hexfloat << value;
}

TEST(DTypeTest, RoundsToNearestEven) {
  for (uint64_t bits = 0; bits < 0xFFFFFFFFu; bits += 65521) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (!std::isnan(value)) expect_rounds_to_nearest(value);
  }
  const float infinity = std::numeric_limits<float>::infinity();
  for (uint32_t bits = 0; bits < 0x7BFF; ++bits) {
    const float low = fp16_to_float(static_cast<uint16_t>(bits));
    const float middle = (low + fp16_to_float(static_cast<uint16_t>(bits + 1))) / 2;
    for (const float value : {middle, std::nextafter(middle, infinity), std::nextafter(middle, 0.0F), -middle}) {
      expect_rounds_to_nearest(value);
    }
  }
  for (uint32_t bits = 0x40; bits < 0x7F7F; bits += 3) {
    const float middle = std::bit_cast<float>((bits << 16) | 0x8000u);
    for (const float value : {middle, std::nextafter(middle, infinity), std::nextafter(middle, 0.0F), -middle}) {
      expect_rounds_to_nearest(value);
    }
  }
  for (const float value : {65504.0F, 65519.0F, 65520.0F, 65536.0F, 3.4e38F, infinity, -infinity}) {
    expect_rounds_to_nearest(value);
  }
}

TEST(DTypeTest, LoadsAndStoresEachType) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    alignas(8) std::byte storage[4 * 8] = {};
    for (int64_t i = 0; i < 4; ++i) store_from_double(storage, dtype, i, 0.1 * static_cast<double>(i + 1));
    for (int64_t i = 0; i < 4; ++i) {
      EXPECT_EQ(load_as_double(storage, dtype, i), test::rounded(0.1 * static_cast<double>(i + 1), dtype));
    }
  }
}

TEST(DTypeTest, AccumulatorIsWide) {
  static_assert(accumulator_of(DType::kBF16) == DType::kF32);
  static_assert(accumulator_of(DType::kF16) == DType::kF32);
  static_assert(accumulator_of(DType::kF32) == DType::kF32);
  static_assert(accumulator_of(DType::kF64) == DType::kF64);
}

}  // namespace
}  // namespace ringspan
