#include "ringspan/base/dtype.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "ringspan/base/error.h"
#include "ringspan/base/words.h"

namespace ringspan {
namespace {

template <class T>
T read(const void* data, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <class T>
void write(void* data, int64_t index, T value) {
  std::memcpy(static_cast<char*>(data) + index * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

struct DTypeInfo {
  DType dtype;
  const char *name, *long_name;
  int64_t bytes;
};

// In the order of DType.
constexpr DTypeInfo kDTypes[] = {
    {DType::kF32, "fp32", "float32", 4}, {DType::kBF16, "bf16", "bfloat16", 2}, {DType::kF16, "fp16", "float16", 2},
    {DType::kF64, "fp64", "float64", 8}, {DType::kByte, "byte", "uint8", 1},
};

const DTypeInfo& info_of(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }

}  // namespace

int64_t size_of(DType dtype) { return info_of(dtype).bytes; }

const char* name_of(DType dtype) { return info_of(dtype).name; }

const char* long_name_of(DType dtype) { return info_of(dtype).long_name; }

DType parse_dtype(std::string_view name) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.dtype != DType::kByte && (name == info.name || name == info.long_name)) return info.dtype;
  }
  throw Error(concat("dtype \"", name, "\" is not known; use ", dtype_help()));
}

std::string dtype_help() {
  std::vector<std::string> names;
  for (const DType dtype : kComputedTypes) names.emplace_back(name_of(dtype));
  return any_of(names);
}

bool is_finite_as(DType dtype, double value) {
  return std::isfinite(dtype == DType::kF64 ? value : static_cast<double>(static_cast<float>(value)));
}

float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

float fp16_to_float(uint16_t bits) {
  const float sign = bits & 0x8000 ? -1.0F : 1.0F;
  const int exponent = (bits >> 10) & 0x1f;
  const int fraction = bits & 0x3ff;
  if (exponent == 0x1f) {
    return fraction ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
}

double load_as_double(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kF32: return read<float>(data, index);
    case DType::kBF16: return bf16_to_float(read<uint16_t>(data, index));
    case DType::kF16: return fp16_to_float(read<uint16_t>(data, index));
    case DType::kF64: return read<double>(data, index);
    case DType::kByte: return read<uint8_t>(data, index);
  }
  return 0;
}

void store_from_double(void* data, DType dtype, int64_t index, double value) {
  switch (dtype) {
    case DType::kF32: return write(data, index, static_cast<float>(value));
    case DType::kBF16: return write(data, index, float_to_bf16(static_cast<float>(value)));
    case DType::kF16: return write(data, index, float_to_fp16(static_cast<float>(value)));
    case DType::kF64: return write(data, index, value);
    case DType::kByte: return write(data, index, static_cast<uint8_t>(value));
  }
}

}  // namespace ringspan
