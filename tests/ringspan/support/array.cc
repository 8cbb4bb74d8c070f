#include "tests/ringspan/support/array.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <stdexcept>

namespace ringspan::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Format {
  int significand_bits;  // the hidden one counts
  int min_exponent;
  double largest;
};

Format format_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16: return {8, -126, std::ldexp(2.0 - std::ldexp(1.0, -7), 127)};
    case DType::kF16: return {11, -14, 65504.0};
    case DType::kF32: return {24, -126, std::ldexp(2.0 - std::ldexp(1.0, -23), 127)};
    case DType::kF64:
    case DType::kByte: break;
  }
  throw std::logic_error("double is never rounded");
}

uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// In (0, 1), a function of the seed and the counter only.
double uniform(uint64_t seed, uint64_t counter) {
  return (static_cast<double>(mix(mix(seed) + counter) >> 11) + 0.5) * 0x1p-53;
}

void check_sizes(const Array& got, const Array& want) {
  if (got.size != want.size) throw std::logic_error("arrays of different sizes were compared");
}

}  // namespace

Array::Array(std::array<int64_t, 4> size, double value)
    : size(size), data(static_cast<std::size_t>(size[0] * size[1] * size[2] * size[3]), value) {}

Array random_array(uint64_t seed, std::array<int64_t, 4> size, DType dtype) {
  Array array(size);
  for (std::size_t i = 0; i < array.data.size(); ++i) {
    const double radius = std::sqrt(-2.0 * std::log(uniform(seed, 2 * i)));  // Box and Muller
    array.data[i] = rounded(radius * std::cos(2 * std::numbers::pi * uniform(seed, 2 * i + 1)), dtype);
  }
  return array;
}

double rounded(double value, DType dtype) {
  if (dtype == DType::kF64 || value == 0 || !std::isfinite(value)) return value;
  const Format format = format_of(dtype);
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  const int unit = exponent - format.significand_bits + 1;
  const double nearest = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
  return std::abs(nearest) > format.largest ? std::copysign(kInfinity, value) : nearest;
}

Array rounded(const Array& array, DType dtype) {
  Array result = array;
  for (double& value : result.data) value = rounded(value, dtype);
  return result;
}

bool same_bits(const Array& a, const Array& b) {
  return a.size == b.size && std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(double)) == 0;
}

double max_error(const Array& got, const Array& want) {
  check_sizes(got, want);
  double error = 0;
  double largest = 0;
  for (std::size_t i = 0; i < want.data.size(); ++i) {
    const double g = got.data[i];
    const double w = want.data[i];
    if (!std::isfinite(w)) {
      if (!(g == w || (std::isnan(g) && std::isnan(w)))) return kInfinity;
      continue;
    }
    if (!std::isfinite(g)) return kInfinity;
    error = std::max(error, std::abs(g - w));
    largest = std::max(largest, std::abs(w));
  }
  if (error == 0) return 0;
  return largest == 0 ? kInfinity : error / largest;
}

double rms_error(const Array& got, const Array& want) {
  check_sizes(got, want);
  double sum = 0;
  for (std::size_t i = 0; i < want.data.size(); ++i) {
    const double difference = got.data[i] - want.data[i];
    sum += difference * difference;
  }
  return want.data.empty() ? 0 : std::sqrt(sum / static_cast<double>(want.data.size()));
}

Array picked(const Array& all, const Pick& pick) {
  Array some({all.size[0], all.size[1], pick.count, all.size[3]});
  for_each_index(some.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
    some.at(b, n, s, d) = all.at(b, n, pick.first + s * pick.stride, d);
  });
  return some;
}

double rms(const Array& array) { return rms_error(array, Array(array.size)); }

}  // namespace ringspan::test
