// The sink: one more key with no value for every row, against the answer without it in closed form,
//     lse' = ln(e^lse + e^sink),   out' = out e^(lse - lse').
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/attention_case.h"

namespace ringspan::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double log_add(double a, double b) {
  const double top = std::max(a, b);
  return top == -kInfinity ? top : top + std::log(std::exp(a - top) + std::exp(b - top));
}

// The case's answer with the sink in it.
Outputs with_sink(const AttentionCase& c, const std::vector<double>& sink) {
  Outputs want = c.want;
  for_each_index(want.lse.size, [&](int64_t b, int64_t n, int64_t s, int64_t) {
    const double before = c.want.lse.at(b, n, s), after = log_add(before, sink[n]);
    want.lse.at(b, n, s) = after;
    want.max.at(b, n, s) = std::max(c.want.max.at(b, n, s), sink[n]);
    want.sum.at(b, n, s) = after == -kInfinity ? 0 : std::exp(after - want.max.at(b, n, s));
    for (int64_t d = 0; d < c.spec.v_dim; ++d) {
      want.out.at(b, n, s, d) *= before == -kInfinity ? 0 : std::exp(before - after);
    }
  });
  return want;
}

class AttentionSinkTest : public ::testing::TestWithParam<Target> {
 protected:
  Kernels kernels() const { return GetParam().kernels; }
};

TEST_P(AttentionSinkTest, JoinsOnceWhateverTheCalls) {
  const std::vector<std::vector<double>> sinks = {
      {3, -1, -kInfinity, 0.5}, {1e4, -1e4, 60, 0}, {-kInfinity, -kInfinity, -kInfinity, -kInfinity}};
  int64_t i = 0;
  // Many rows, and few, which take a path of their own; rows that keep nothing.
  for (const int64_t q_len : {90, 3, 1}) {
    for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
      AttentionCase c({.dtype = dtype,
                       .batch = 2,
                       .q_heads = 4,
                       .kv_heads = 2,
                       .q_len = q_len,
                       .kv_len = 130,
                       .qk_dim = 24,
                       .v_dim = 17,
                       .mask = kAllMasks[(i + 1) % 10]});
      const std::vector<double>& sink = sinks[i++ % sinks.size()];
      c.want = with_sink(c, sink);
      for (const int64_t num_calls : {1, 3}) {
        SCOPED_TRACE(::testing::Message() << c.spec << " calls " << num_calls);
        expect_accurate(c, run_forward(c, kernels(), {.num_calls = num_calls, .sink = sink}));
      }
    }
  }
}

TEST_P(AttentionSinkTest, NoSinkAndNothingInItAreTheSameBits) {
  const auto c = make_case({.q_heads = 2, .kv_heads = 1, .q_len = 40, .kv_len = 50, .mask = MaskKind::kCausal});
  expect_same(run_forward(*c, kernels(), {.sink = {-kInfinity, -kInfinity}}), run_forward(*c, kernels()));
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionSinkTest, ::testing::ValuesIn(all_targets()),
                         [](const auto& param) { return param.param.name; });

TEST(AttentionSinkReferenceTest, TheReferenceJoinsItToo) {
  AttentionCase c({.q_heads = 2, .kv_heads = 1, .q_len = 12, .kv_len = 20, .mask = MaskKind::kStrided});
  const std::vector<double> sink = {2, -kInfinity};
  c.want = with_sink(c, sink);
  expect_accurate(c, run_forward(c, reference_kernels(), {.num_calls = 2, .sink = sink}));
}

TEST(SinkGradientTest, IsTheFormulaAndSkipsEmptyRows) {
  const Array lse = array_of(
      {2, 3, 4, 1}, {1, 2, -kInfinity, 4, 0, 0, 0, 0, -1, -2, -3, -4, 5, 6, 7, 8, 9, 9, 9, -kInfinity, 1, 1, 1, 1});
  Array delta(lse.size);
  for (size_t i = 0; i < 24; ++i)
    delta.data[i] = std::isinf(lse.data[i]) ? std::nan("") : 0.1 * static_cast<double>(i) - 1;
  const std::vector<double> sink = {1, -kInfinity, 3};
  std::vector<double> want(3, 0.0);
  for_each_index(lse.size, [&](int64_t b, int64_t n, int64_t s, int64_t) {
    if (!std::isinf(lse.at(b, n, s))) want[n] -= std::exp(sink[n] - lse.at(b, n, s)) * delta.at(b, n, s);
  });
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Tensor s(array_of({1, 3, 1, 1}, sink), dtype), l(lse, dtype), d(delta, dtype);
    Tensor got(dtype, {1, 3, 1, 1});
    sink_gradient(s.view(), l.view(), d.view(), got.view(), ThreadPool(3));
    for (int64_t n = 0; n < 3; ++n) {
      EXPECT_NEAR(got.array().at(0, n, 0), want[n], std::abs(want[n]) * (dtype == DType::kF32 ? 1e-6 : 1e-14));
    }
  }
}

}  // namespace
}  // namespace ringspan::test
