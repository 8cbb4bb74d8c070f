// Element types, and the scalar conversions that the reference and the tests share.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace ringspan {

enum class DType : uint8_t { kF32, kBF16, kF16, kF64 };

int64_t size_of(DType dtype);              // bytes per element
const char* name_of(DType dtype);          // "fp32", "bf16", "fp16", "fp64"
DType parse_dtype(std::string_view name);  // the inverse; Error names the known ones

// Sums, statistics and gradients in flight are kept in this type: fp64 for fp64, else fp32.
constexpr DType accumulator_of(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

// Round to nearest even, as the hardware conversions do.
float bf16_to_float(uint16_t bits);
uint16_t float_to_bf16(float value);
float fp16_to_float(uint16_t bits);
uint16_t float_to_fp16(float value);

// Element `index` of an array of `dtype`, as double, and back.
double load_as_double(const void* data, DType dtype, int64_t index);
void store_from_double(void* data, DType dtype, int64_t index, double value);

}  // namespace ringspan
