// Element types, and the scalar conversions that the reference and the tests share.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace ringspan {

// kByte is what boolean masks are stored in; nothing is computed in it.
enum class DType : uint8_t { kF32, kBF16, kF16, kF64, kByte };

int64_t size_of(DType dtype);              // bytes per element
const char* name_of(DType dtype);          // "fp32", "bf16", "fp16", "fp64", "byte"
const char* long_name_of(DType dtype);     // PyTorch's: "float32", "bfloat16", "float16", "float64", "uint8"
DType parse_dtype(std::string_view name);  // of either name, for types that are computed in; Error names them
// The short names, for messages and help.
std::string dtype_help();
// Those types, in the order in which they are listed everywhere.
inline constexpr DType kComputedTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};

// Sums, statistics and gradients in flight are kept in this type: fp64 for fp64, else fp32.
constexpr DType accumulator_of(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

// Whether `value` is finite once it is rounded to `dtype`, fp32 or fp64.
bool is_finite_as(DType dtype, double value);

float bf16_to_float(uint16_t bits);
float fp16_to_float(uint16_t bits);

// Round to nearest, ties to even, as the hardware does; NaN stays NaN. Without branches, so that loops become vectors.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

inline uint16_t float_to_fp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  // Below 2^-14 numbers are multiples of 2^-24, the spacing of fp32 at 0.5: adding 0.5 rounds to one.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000;
  // Exponents are biased by 127 and 15; a carry out of the fraction runs into the exponent, as it should.
  const uint32_t normal = (magnitude - (112U << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
  // From 65520 on, half way between the largest fp16 and the next power of two, everything is infinite.
  const uint32_t result = magnitude > 0x7f800000 ? 0x7e00 : magnitude >= 0x477ff000 ? 0x7c00 : finite;
  return static_cast<uint16_t>(((bits >> 16) & 0x8000) | result);
}

// Element `index` of an array of `dtype`, as double, and back.
double load_as_double(const void* data, DType dtype, int64_t index);
void store_from_double(void* data, DType dtype, int64_t index, double value);

}  // namespace ringspan
