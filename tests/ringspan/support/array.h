// Array: a dense [batch, heads, rows, dim] tensor of double, in which tests keep inputs and expected values.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "ringspan/base/dtype.h"

namespace ringspan::test {

struct Array {
  Array() = default;
  explicit Array(std::array<int64_t, 4> size, double value = 0);

  double& at(int64_t b, int64_t n, int64_t s, int64_t d = 0) { return data[index(b, n, s, d)]; }
  double at(int64_t b, int64_t n, int64_t s, int64_t d = 0) const { return data[index(b, n, s, d)]; }
  const double* row(int64_t b, int64_t n, int64_t s) const { return data.data() + index(b, n, s, 0); }
  double* row(int64_t b, int64_t n, int64_t s) { return data.data() + index(b, n, s, 0); }
  std::size_t index(int64_t b, int64_t n, int64_t s, int64_t d) const {
    return static_cast<std::size_t>(((b * size[1] + n) * size[2] + s) * size[3] + d);
  }

  bool is_given() const { return size[0] > 0; }  // also one without elements

  std::array<int64_t, 4> size{};
  std::vector<double> data;
};

inline Array array_of(const std::array<int64_t, 4>& size, std::vector<double> values) {
  Array array(size);
  array.data = std::move(values);
  return array;
}

// Calls body(b, n, s, d) for every index, in memory order.
template <class Body>
void for_each_index(const std::array<int64_t, 4>& size, const Body& body) {
  for (int64_t b = 0; b < size[0]; ++b)
    for (int64_t n = 0; n < size[1]; ++n)
      for (int64_t s = 0; s < size[2]; ++s)
        for (int64_t d = 0; d < size[3]; ++d) body(b, n, s, d);
}

// Rows first, first + stride, ..., `count` of them.
struct Pick {
  int64_t first = 0, stride = 1, count = 0;
};
Array picked(const Array& all, const Pick& pick);

// Standard normal values, another one for each element and seed, the same on every machine; rounded to `dtype`.
Array random_array(uint64_t seed, std::array<int64_t, 4> size, DType dtype);

// The nearest value of `dtype`, ties to even, computed from the format's definition (no code of the product).
double rounded(double value, DType dtype);
Array rounded(const Array& array, DType dtype);

// Bit by bit, the signs of zeros included.
bool same_bits(const Array& a, const Array& b);

// max |got - want| / max |want|. Where `want` is infinite or NaN, `got` must be the same, else the error is infinite;
// such places count no further. Where all of `want` is 0, so must `got` be. Sizes must agree.
double max_error(const Array& got, const Array& want);
// Root of the mean square of the difference.
double rms_error(const Array& got, const Array& want);
double rms(const Array& array);

}  // namespace ringspan::test
