#include "tests/ringspan/support/ring_cases.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "ringspan/base/philox.h"

namespace ringspan::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double shared_at(const Array& x, int64_t b, int64_t n, int64_t i, int64_t j) {
  return x.at(b % x.size[0], n % x.size[1], i % x.size[2], j % x.size[3]);
}

// What is added to the score of a pair; -inf where the pair takes no part.
double added_to_score(const RingInputs& in, const PairGrid& grid, int64_t b, int64_t n, int64_t i, int64_t j) {
  const int64_t row = i - grid.q_begin, column = j - grid.kv_begin;
  if (in.mask.is_given()) {
    const bool by_grid = in.mask_by_grid;
    if (shared_at(in.mask, b, n, by_grid ? row : i, by_grid ? column : j) == 0) return -kInfinity;
  }
  double sum = in.bias.is_given() ? shared_at(in.bias, b, n, i, j) : 0;
  if (sum == -kInfinity) return sum;
  sum *= in.bias_factor;
  if (!in.slopes.is_given()) return sum;
  const double distance = std::abs(static_cast<double>(column - row + in.slope_shift));
  return sum - shared_at(in.slopes, b, n, 0, 0) * (in.slope_of_root ? std::sqrt(distance) : distance);
}

double largest(const Array& array) {
  double most = 0;
  for (const double value : array.data) most = std::isfinite(value) ? std::max(most, std::abs(value)) : most;
  return most;
}

// How large the terms are of which gradients are sums: rounding is relative to these where they cancel.
struct Sizes {
  double score = 0;  // of dS and of sums of dS
  double q = 0, k = 0, v = 0;
};
Sizes sizes_of(const Inputs& inputs, const Outputs& outputs, const Gradients& gradients, const Array& dout) {
  const double value = largest(inputs.v) * largest(dout) * static_cast<double>(inputs.v.size[3]);
  const double drop = inputs.terms.is_dropped ? 1 / (1 - inputs.terms.dropout_p) : 1;
  double most = 0;
  for (int64_t b = 0; b < outputs.p.size[0]; ++b) {
    for (int64_t n = 0; n < outputs.p.size[1]; ++n) {
      for (int64_t j = 0; j < outputs.p.size[3]; ++j) {
        double sum = 0;
        for (int64_t i = 0; i < outputs.p.size[2]; ++i) sum += outputs.p.at(b, n, i, j);
        most = std::max(most, sum);
      }
    }
  }
  const double share =
      std::max(1.0, most * static_cast<double>(inputs.q.size[1] / std::max<int64_t>(inputs.k.size[1], 1)));
  const double size = share * std::max(drop * value, largest(gradients.delta)) / 4;
  const double scale = std::abs(inputs.scale);
  return {size, size * scale * largest(inputs.k), size * scale * largest(inputs.q), drop * share * largest(dout) / 4};
}

struct Limits {
  double forward, gradient;
};
Limits limits_of(DType dtype) {
  switch (dtype) {
    case DType::kF64: return {1e-12, 1e-11};
    case DType::kBF16: return {0x1p-7, 0x1p-6};
    case DType::kF16: return {0x1p-10, 0x1p-9};
    default: return {1e-5, 5e-5};
  }
}

void expect_near(const char* name, const Array& got, const Array& want, double size, double limit) {
  ASSERT_EQ(got.size, want.size) << name;
  const double bound = limit * std::max(largest(want), size);
  for (std::size_t i = 0; i < got.data.size(); ++i) {
    if (std::isfinite(want.data[i])) {
      ASSERT_NEAR(got.data[i], want.data[i], bound) << name << " at " << i;
    } else {
      ASSERT_EQ(got.data[i], want.data[i]) << name << " at " << i;
    }
  }
}

}  // namespace

Inputs oracle_inputs(const Problem& p, const RingInputs& in, const Keep& keep) {
  Inputs inputs{in.q, in.k, in.v, p.scale, keep};
  inputs.sink = in.sink;
  inputs.terms.softcap = in.softcap;
  if (in.bias.is_given() || in.mask.is_given() || in.slopes.is_given()) {
    inputs.terms.bias = [&in, p](int64_t b, int64_t n, int64_t i, int64_t j) {
      return added_to_score(in, grid_at(in, p, i), b, n, i, j);
    };
  }
  if (in.dropout.p == 0) return inputs;
  inputs.terms.dropout_p = in.dropout.p;
  inputs.terms.is_dropped = [&in, p](int64_t b, int64_t n, int64_t i, int64_t j) {
    const PairGrid grid = grid_at(in, p, i);
    const uint64_t index =
        grid.origin + static_cast<uint64_t>(b) * grid.batch_stride + static_cast<uint64_t>(n) * grid.head_stride +
        static_cast<uint64_t>(i - grid.q_begin) * grid.row_stride + static_cast<uint64_t>(j - grid.kv_begin);
    return draw_of_pair(in.dropout.seed, in.dropout.offset, index) >= keep_threshold(in.dropout.p);
  };
  return inputs;
}

Expected expected_of(const Problem& p, const RingInputs& in, const Keep& keep) {
  const Inputs inputs = oracle_inputs(p, in, keep);
  Expected expected{oracle_forward(inputs), {}, Array(in.bias.size)};
  expected.gradients = oracle_backward(inputs, expected.outputs, in.dout, in.dlse);
  if (!in.bias.is_given() || !in.wants_dbias) return expected;
  Array& dbias = expected.dbias;
  for_each_index(expected.gradients.ds.size, [&](int64_t b, int64_t n, int64_t i, int64_t j) {
    dbias.at(b % dbias.size[0], n % dbias.size[1], i % dbias.size[2], j) +=
        in.bias_factor * expected.gradients.ds.at(b, n, i, j);
  });
  return expected;
}

void expect_close(const RingResults& got, const Expected& want, double forward_bound, double gradient_bound) {
  EXPECT_LE(max_error(got.out, want.outputs.out), forward_bound);
  EXPECT_LE(max_error(got.lse, want.outputs.lse), forward_bound);
  EXPECT_LE(max_error(got.max, want.outputs.max), forward_bound);
  EXPECT_LE(max_error(got.sum, want.outputs.sum), forward_bound);
  EXPECT_LE(max_error(got.dq, want.gradients.dq), gradient_bound);
  EXPECT_LE(max_error(got.dk, want.gradients.dk), gradient_bound);
  EXPECT_LE(max_error(got.dv, want.gradients.dv), gradient_bound);
}

void expect_exact(const Problem& p, const RingInputs& in, const Keep& keep, const RingResults& got) {
  const Expected want = expected_of(p, in, keep);
  const Sizes sizes = sizes_of(oracle_inputs(p, in, keep), want.outputs, want.gradients, in.dout);
  const Limits limits = limits_of(p.dtype);
  const double stats = accumulator_of(p.dtype) == DType::kF64 ? 1e-12 : 1e-5;
  expect_near("out", got.out, want.outputs.out, largest(in.v) / 4, limits.forward);
  expect_near("max", got.max, want.outputs.max, 1, stats);
  expect_near("sum", got.sum, want.outputs.sum, 1, stats);
  expect_near("lse", got.lse, want.outputs.lse, 1, stats);
  expect_near("dq", got.dq, want.gradients.dq, sizes.q, limits.gradient);
  expect_near("dk", got.dk, want.gradients.dk, sizes.k, limits.gradient);
  expect_near("dv", got.dv, want.gradients.dv, sizes.v, limits.gradient);
  const double rows = static_cast<double>(std::max<int64_t>(p.q_len, 1));
  expect_near("dbias", got.dbias, want.dbias, std::abs(in.bias_factor) * sizes.score, limits.gradient);
  const auto heads = static_cast<int64_t>(want.gradients.dsink.size());
  expect_near("dsink", array_of({1, heads, 1, 1}, got.dsink), array_of({1, heads, 1, 1}, want.gradients.dsink),
              rows * sizes.score, limits.gradient);
}

}  // namespace ringspan::test
