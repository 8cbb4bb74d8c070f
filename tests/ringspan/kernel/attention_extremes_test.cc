// Scores at the ends of what exp() can take, scales of every sign, and partial results whose maxima lie far apart.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/attention_case.h"

namespace ringspan::test {
namespace {

class AttentionExtremesTest : public ::testing::TestWithParam<Target> {
 protected:
  Kernels kernels() const { return GetParam().kernels; }
};

// A masked score is -inf, and -inf times a scale of 0 would be NaN.
TEST_P(AttentionExtremesTest, ScaleOfAnySize) {
  int64_t i = 0;
  for (const double scale : {-0.5, 0.0, 0.31, -1e-3, 1.0}) {
    for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
      const auto c = make_case({.dtype = dtype,
                                .q_heads = 4,
                                .kv_heads = 2,
                                .q_len = 90,
                                .kv_len = 130,
                                .qk_dim = 24,
                                .v_dim = 16,
                                .mask = kAllMasks[++i % 10],
                                .scale = scale});
      SCOPED_TRACE(::testing::Message() << c->spec << " scale " << scale);
      expect_accurate(*c, run_forward(*c, kernels()));
      expect_accurate(*c, run_forward(*c, kernels(), {.num_calls = 3}));
      expect_accurate(*c, run_backward(*c, kernels()));
    }
  }
}

// 0 as fp32, though not as given.
TEST_P(AttentionExtremesTest, ScaleTooSmallForFp32) {
  AttentionCase c({.dtype = DType::kBF16, .q_len = 50, .kv_len = 50, .mask = MaskKind::kCausal, .scale = 0.0});
  c.inputs.scale = 1e-50;
  expect_accurate(c, run_forward(c, kernels()));
}

// Scores of exactly +-1e4: each query has one entry of +-100, each key only entries of +-100.
TEST_P(AttentionExtremesTest, ScoresOfTenThousand) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    CaseSpec spec{.dtype = dtype,
                  .q_heads = 2,
                  .kv_heads = 2,
                  .q_len = 130,
                  .kv_len = 290,
                  .mask = MaskKind::kCausal,
                  .scale = 1.0};
    AttentionCase c(spec);
    for_each_index(c.inputs.q.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
      double& q = c.inputs.q.at(b, n, s, d);
      q = d == s % 16 ? std::copysign(100.0, q) : 0.0;
    });
    for (double& k : c.inputs.k.data) k = std::copysign(100.0, k);
    c.want = oracle_forward(c.inputs);
    c.want_grads = oracle_backward(c.inputs, c.want, c.dout, c.dlse);
    ASSERT_EQ(*std::max_element(c.want.max.data.begin(), c.want.max.data.end()), 1e4);
    ASSERT_EQ(*std::min_element(c.want.max.data.begin(), c.want.max.data.end()), -1e4);
    // In fp32 a score of 1e4, counted in powers of two, has a spacing of 2^-10: weights may be off by 7e-4, though
    // those of equal scores alike.
    const double tolerance = dtype == DType::kF64 ? 1e-10 : dtype == DType::kBF16 ? 8e-3 : 1e-3;
    for (const int64_t num_calls : {1, 3}) {
      const ForwardResult got = run_forward(c, kernels(), {.num_calls = num_calls});
      EXPECT_LE(max_error(got.out, c.want.out), tolerance);
      EXPECT_LE(max_error(got.lse, c.want.lse), 1e-5);
      EXPECT_LE(max_error(got.max, c.want.max), 1e-5);
      EXPECT_LE(max_error(got.sum, c.want.sum), dtype == DType::kF64 ? 1e-10 : 1e-3);
    }
    // An lse of 1e4 in fp32 is off by up to 5e-4, and P with it.
    const BackwardResult grads = run_backward(c, kernels());
    EXPECT_LE(max_error(grads.dq, c.want_grads.dq), 2e-2);
    EXPECT_LE(max_error(grads.dk, c.want_grads.dk), 2e-2);
    EXPECT_LE(max_error(grads.dv, c.want_grads.dv), 2e-2);
  }
}

// Large random scores: whatever fp32 makes of them, everything is finite and `out` lies among the values.
TEST_P(AttentionExtremesTest, LargeRandomScoresStayFinite) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const auto c = make_case({.dtype = dtype,
                              .q_heads = 2,
                              .kv_heads = 1,
                              .q_len = 70,
                              .kv_len = 300,
                              .qk_dim = 64,
                              .v_dim = 8,
                              .mask = MaskKind::kBottomRight,
                              .scale = 1.0,
                              .amplitude = 30});
    double largest = 0;
    for (const double v : c->inputs.v.data) largest = std::max(largest, std::abs(v));
    for (const double out : run_forward(*c, kernels(), {.num_calls = 2}).out.data) ASSERT_LE(std::abs(out), largest);
    const BackwardResult grads = run_backward(*c, kernels());
    for (const Array* array : {&grads.dq, &grads.dk, &grads.dv}) {
      for (const double value : array->data) ASSERT_TRUE(std::isfinite(value));
    }
  }
}

// The limit that docs/maths.md states: a score is a sum rounded in fp32, so what is off by large scores is their own
// rounding, a few units of 2^-23 of the largest one, and no more.
TEST_P(AttentionExtremesTest, LargeScoresLoseNoMoreThanTheirOwnRounding) {
  for (const int64_t dim : {64, 200}) {
    for (const double amplitude : {1.0, 2.0, 4.0, 8.0}) {
      const auto c = make_case({.q_heads = 2,
                                .kv_heads = 1,
                                .q_len = 150,
                                .kv_len = 300,
                                .qk_dim = dim,
                                .v_dim = 16,
                                .mask = MaskKind::kBottomRight,
                                .amplitude = amplitude});
      SCOPED_TRACE(::testing::Message() << c->spec << " amplitude " << amplitude);
      const double top = *std::max_element(c->want.max.data.begin(), c->want.max.data.end());
      double largest = 0;
      for (const double v : c->inputs.v.data) largest = std::max(largest, std::abs(v));
      const double rounding = 4 * std::numeric_limits<float>::epsilon() * std::max(top, 1.0);
      const ForwardResult got = run_forward(*c, kernels(), {.num_calls = 2});
      EXPECT_LE(max_error(got.out, c->want.out), rounding * largest) << "largest score " << top;
      EXPECT_LE(max_error(got.lse, c->want.lse), rounding) << "largest score " << top;
    }
  }
}

// Two sets of four keys whose scores are 0 and `far`; the answer is in closed form.
TEST_P(AttentionExtremesTest, PartsWithFarApartMaxima) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    for (const double far : {120.0, -120.0, 1e4, -1e4}) {
      for (const bool swapped : {false, true}) {
        for (const int64_t num_calls : {1, 2}) {
          AttentionCase c({.dtype = dtype, .q_len = 8, .kv_len = 8, .scale = far / 480});
          for (double& q : c.inputs.q.data) q = 1;
          for_each_index(c.inputs.k.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
            c.inputs.k.at(b, n, s, d) = (s >= 4) != swapped ? 30 : 0;
          });
          c.want = oracle_forward(c.inputs);
          const ForwardResult got = run_forward(c, kernels(), {.num_calls = num_calls});
          const bool high_rows = (far > 0) != swapped;
          for (int64_t d = 0; d < 16; ++d) {
            double mean = 0;
            for (int64_t j = 0; j < 4; ++j) mean += c.inputs.v.at(0, 0, high_rows ? 4 + j : j, d) / 4;
            EXPECT_NEAR(got.out.at(0, 0, 5, d), mean, dtype == DType::kBF16 ? 8e-3 : 1e-6);
          }
          const double lse = std::max(far, 0.0) + std::log(4.0);
          EXPECT_NEAR(got.lse.at(0, 0, 5), lse, 1e-5 * lse);
        }
      }
    }
  }
}

// Scores that grow from key to key make each block raise the maximum; falling ones leave it to the first block.
TEST_P(AttentionExtremesTest, RisingAndFallingScores) {
  for (const double slope : {0.5, -0.5, 7.0, -7.0}) {
    AttentionCase c({.q_heads = 1,
                     .q_len = 40,
                     .kv_len = 700,
                     .qk_dim = 4,
                     .v_dim = 8,
                     .mask = MaskKind::kBottomRight,
                     .scale = 1.0});
    for_each_index(c.inputs.k.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
      c.inputs.k.at(b, n, s, d) = d == 0 ? 3 + slope * static_cast<double>(s) : 0;
    });
    for (double& q : c.inputs.q.data) q = 1;
    c.want = oracle_forward(c.inputs);
    for (const int64_t num_calls : {1, 4}) {
      expect_accurate(c, run_forward(c, kernels(), {.num_calls = num_calls}));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionExtremesTest, ::testing::ValuesIn(all_targets()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace ringspan::test
