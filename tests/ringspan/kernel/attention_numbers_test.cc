// scale, softcap and bias_factor at the ends of the type that scores are computed in: exact just inside, refused just
// outside.
#include <cmath>
#include <limits>
#include <optional>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"
#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/attention_case.h"

namespace ringspan::test {
namespace {

constexpr double kMost32 = std::numeric_limits<float>::max(), kMost64 = std::numeric_limits<double>::max();

class AttentionNumbersTest : public ::testing::TestWithParam<Target> {
 protected:
  Kernels kernels() const { return GetParam().kernels; }
};

CaseSpec spec_of(DType dtype) {
  return {.dtype = dtype,
          .q_heads = 2,
          .kv_heads = 1,
          .q_len = 70,
          .kv_len = 90,
          .qk_dim = 8,
          .v_dim = 8,
          .mask = MaskKind::kFull};
}

// The message of the Error that a forward with `pairs` throws, or one with another scale; "" where there is none.
std::string refusal(DType dtype, const Kernels& kernels, const PairInputs& pairs, std::optional<double> scale = {}) {
  AttentionCase c(spec_of(dtype));
  if (scale) c.inputs.scale = *scale;
  std::string forward, backward;
  try {
    run_forward(c, kernels, {.pairs = pairs});
  } catch (const Error& error) {
    forward = error.what();
  }
  try {
    run_backward(c, kernels, {.pairs = pairs});
  } catch (const Error& error) {
    backward = error.what();
  }
  EXPECT_EQ(forward, backward);
  return forward;
}

TEST_P(AttentionNumbersTest, TheLargestScaleIsExact) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    CaseSpec spec = spec_of(dtype);
    // The oracle itself is in fp64, and multiplies gradients of scores with the scale.
    spec.scale = dtype == DType::kF64 ? kMost64 / 64 : kMost32;
    spec.amplitude = dtype == DType::kF64 ? 0x1p-512 : 0x1p-64;
    for (const int64_t q_len : {70, 1}) {
      spec.q_len = q_len;
      const AttentionCase c(spec);
      SCOPED_TRACE(spec);
      expect_accurate(c, run_forward(c, kernels()));
      expect_accurate(c, run_backward(c, kernels()));
    }
  }
}

TEST_P(AttentionNumbersTest, TheLargestAndTheSmallestSoftcapAreExact) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const double most = dtype == DType::kF64 ? kMost64 : kMost32;
    // The smallest, whose inverse is finite in this type, holds all scores at its own size.
    const double least = dtype == DType::kF64
                             ? std::nextafter(1 / kMost64, 1)
                             : static_cast<double>(std::nextafterf(static_cast<float>(1 / kMost32), 1));
    for (const double softcap : {most, least}) {
      for (const int64_t q_len : {70, 1}) {
        CaseSpec spec = spec_of(dtype);
        spec.q_len = q_len;
        PairTerms terms;
        terms.softcap = softcap;
        const AttentionCase c(spec, terms);
        PairInputs pairs;
        pairs.numbers.softcap = softcap;
        SCOPED_TRACE(::testing::Message() << spec << " softcap " << softcap);
        expect_accurate(c, run_forward(c, kernels(), {.pairs = pairs}));
        expect_accurate(c, run_backward(c, kernels(), {.pairs = pairs}));
      }
    }
  }
}

TEST_P(AttentionNumbersTest, TheLargestBiasFactorIsExact) {
  CaseSpec spec = spec_of(DType::kF32);
  const Array bias = rounded(random_array(5, {1, 1, spec.q_len, spec.kv_len}, DType::kF32), DType::kF32);
  Array small = bias;
  for (double& value : small.data) value *= 0x1p-125;
  PairTerms terms;
  terms.bias = [&](int64_t, int64_t, int64_t i, int64_t j) { return kMost32 * small.at(0, 0, i, j); };
  const AttentionCase c(spec, terms);
  const Tensor tensor(small, DType::kF32);
  PairInputs pairs;
  pairs.bias = tensor.view();
  pairs.bias.size[1] = spec.q_heads;
  pairs.bias.stride[1] = 0;
  pairs.bias_factor = kMost32;
  expect_accurate(c, run_forward(c, kernels(), {.pairs = pairs}));
  expect_accurate(c, run_backward(c, kernels(), {.pairs = pairs}));
}

TEST_P(AttentionNumbersTest, WhatIsInfiniteInTheAccumulatorTypeIsRefused) {
  const auto with_softcap = [](double softcap) {
    PairInputs pairs;
    pairs.numbers.softcap = softcap;
    return pairs;
  };
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    EXPECT_EQ(refusal(dtype, kernels(), {}, 1e39), "scale is 1e+39, which is not finite in fp32");
    EXPECT_EQ(refusal(dtype, kernels(), {}, -3.5e38), "scale is -3.5e+38, which is not finite in fp32");
    EXPECT_EQ(refusal(dtype, kernels(), with_softcap(1e39)), "softcap is 1e+39, which is infinite in fp32");
    EXPECT_EQ(refusal(dtype, kernels(), with_softcap(2e-39)),
              "softcap is 2e-39, and 1 / softcap, 5e+38, is infinite in fp32");
    EXPECT_NE(refusal(dtype, kernels(), with_softcap(1e-60)).find("infinite in fp32"), std::string::npos);
    EXPECT_NE(refusal(dtype, kernels(), with_softcap(std::nan(""))).find("softcap is nan"), std::string::npos);
    EXPECT_EQ(refusal(dtype, kernels(), with_softcap(3.4e38)), "");
    EXPECT_EQ(refusal(dtype, kernels(), {}, 0.25), "");
  }
  EXPECT_EQ(refusal(DType::kF64, kernels(), {}, 1e39), "");
  EXPECT_EQ(refusal(DType::kF64, kernels(), with_softcap(1e39)), "");
  EXPECT_EQ(refusal(DType::kF64, kernels(), with_softcap(5e-309)),
            "softcap is 5e-309, and 1 / softcap, inf, is infinite in fp64");
}

TEST_P(AttentionNumbersTest, ABiasFactorIsRefusedWhereThereIsABias) {
  const CaseSpec spec = spec_of(DType::kBF16);
  const Tensor bias(Array({1, spec.q_heads, spec.q_len, spec.kv_len}, 1), DType::kBF16);
  PairInputs pairs;
  pairs.bias_factor = 1e39;
  EXPECT_EQ(refusal(DType::kBF16, kernels(), pairs), "");
  pairs.bias = bias.view();
  EXPECT_EQ(refusal(DType::kBF16, kernels(), pairs), "bias_factor is 1e+39, which is not finite in fp32");
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionNumbersTest, ::testing::ValuesIn(native_targets()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace ringspan::test
