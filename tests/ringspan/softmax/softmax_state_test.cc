#include "ringspan/softmax/softmax_state.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"

#include "tests/ringspan/support/array.h"
#include "tests/ringspan/support/tensor.h"

namespace ringspan {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Row `row` of the state becomes attention over the given scores and one-element values.
void set_row(const SoftmaxState& state, int64_t row, const std::vector<double>& scores,
             const std::vector<double>& values) {
  double max = -kInfinity, sum = 0, acc = 0;
  for (const double score : scores) max = std::max(max, score);
  for (std::size_t j = 0; j < scores.size(); ++j) {
    sum += std::exp(scores[j] - max);
    acc += std::exp(scores[j] - max) * values[j];
  }
  const DType dtype = state.max.dtype;
  store_from_double(state.max.row(0, 0, row), dtype, 0, max);
  store_from_double(state.sum.row(0, 0, row), dtype, 0, sum);
  store_from_double(state.acc.row(0, 0, row), dtype, 0, acc);
}

struct Finished {
  test::Array out, max, sum, lse;
};

Finished finished(const SoftmaxState& state, DType out_dtype) {
  const DType wide = state.max.dtype;
  test::Tensor out(out_dtype, state.acc.size, {2, 1, 0, 3});
  test::Tensor max(wide, state.max.size), sum(wide, state.max.size), lse(wide, state.max.size);
  finish(state, {out.view(), max.view(), sum.view(), lse.view()});
  return {out.array(), max.array(), sum.array(), lse.array()};
}

class SoftmaxStateTest : public ::testing::TestWithParam<DType> {
 protected:
  double tolerance() const { return GetParam() == DType::kF64 ? 1e-15 : 1e-6; }
};

TEST_P(SoftmaxStateTest, IdentityFinishesAsTheEmptyRow) {
  const OwnedSoftmaxState owned(GetParam(), 2, 3, 4, 5);
  const Finished result = finished(owned.state(), GetParam());
  EXPECT_EQ(result.out.data, std::vector<double>(120, 0.0));
  EXPECT_EQ(result.max.data, std::vector<double>(24, -kInfinity));
  EXPECT_EQ(result.sum.data, std::vector<double>(24, 0.0));
  EXPECT_EQ(result.lse.data, std::vector<double>(24, -kInfinity));
}

TEST_P(SoftmaxStateTest, ASinkIsAKeyWithoutAValue) {
  const std::vector<std::vector<double>> rows = {{0.5, -1, 2}, {}, {-700, -701}, {40}};
  for (const double sink : {0.0, 3.0, -kInfinity, 1000.0}) {
    const OwnedSoftmaxState with(GetParam(), 1, 1, 4, 1), want(GetParam(), 1, 1, 4, 1);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      std::vector<double> scores = rows[r], values(scores.size(), 1.5);
      if (!scores.empty()) set_row(with.state(), static_cast<int64_t>(r), scores, values);
      scores.push_back(sink);
      values.push_back(0);
      if (std::isfinite(sink) || !rows[r].empty()) set_row(want.state(), static_cast<int64_t>(r), scores, values);
    }
    const test::Tensor one(test::array_of({1, 1, 1, 1}, {sink}), GetParam());
    add_sink(one.view(), with.state());
    const Finished got = finished(with.state(), GetParam()), expected = finished(want.state(), GetParam());
    for (int64_t r = 0; r < 4; ++r) {
      EXPECT_NEAR(got.out.at(0, 0, r), expected.out.at(0, 0, r), tolerance());
      EXPECT_EQ(got.max.at(0, 0, r), expected.max.at(0, 0, r));
      const double lse = expected.lse.at(0, 0, r);
      if (std::isinf(lse)) {
        EXPECT_EQ(got.lse.at(0, 0, r), lse);
      } else {
        EXPECT_NEAR(got.lse.at(0, 0, r), lse, tolerance() * std::max(1.0, std::abs(lse)));
      }
    }
  }
}

TEST_P(SoftmaxStateTest, MergeWithTheIdentityChangesNothing) {
  const OwnedSoftmaxState a(GetParam(), 1, 1, 2, 1), identity(GetParam(), 1, 1, 2, 1);
  set_row(a.state(), 0, {1, 2, 3}, {4, -5, 6});
  const test::Array max = test::Tensor::to_array(a.state().max), sum = test::Tensor::to_array(a.state().sum),
                    acc = test::Tensor::to_array(a.state().acc);
  merge(identity.state(), a.state());
  EXPECT_EQ(test::Tensor::to_array(a.state().max).data, max.data);
  EXPECT_EQ(test::Tensor::to_array(a.state().sum).data, sum.data);
  EXPECT_EQ(test::Tensor::to_array(a.state().acc).data, acc.data);
  merge(a.state(), identity.state());
  EXPECT_EQ(test::Tensor::to_array(identity.state().max).data, max.data);
  EXPECT_EQ(test::Tensor::to_array(identity.state().sum).data, sum.data);
  EXPECT_EQ(test::Tensor::to_array(identity.state().acc).data, acc.data);
}

TEST_P(SoftmaxStateTest, PartsJoinToTheWholeInAnyOrder) {
  const std::vector<double> scores{0.5, -2, 3, 1, 1.5, -4}, values{1, 2, -3, 4, 5, -6};
  const OwnedSoftmaxState whole(GetParam(), 1, 1, 1, 1);
  set_row(whole.state(), 0, scores, values);
  const Finished want = finished(whole.state(), GetParam());
  const std::size_t orders[][3] = {{0, 1, 2}, {2, 1, 0}, {1, 0, 2}};
  for (const auto& order : orders) {
    const OwnedSoftmaxState into(GetParam(), 1, 1, 1, 1);
    for (const std::size_t part : order) {
      const OwnedSoftmaxState state(GetParam(), 1, 1, 1, 1);
      set_row(state.state(), 0, {scores[2 * part], scores[2 * part + 1]}, {values[2 * part], values[2 * part + 1]});
      merge(state.state(), into.state());
    }
    const Finished got = finished(into.state(), GetParam());
    EXPECT_NEAR(got.out.data[0], want.out.data[0], 4 * tolerance());
    EXPECT_NEAR(got.lse.data[0], want.lse.data[0], 4 * tolerance());
    EXPECT_EQ(got.max.data[0], 3);
  }
}

// Scores 0 against 120 and -120: e^120 is no float, so whoever exponentiates a difference the wrong way round sees it.
TEST_P(SoftmaxStateTest, FarApartMaximaStayFinite) {
  for (const double far : {120.0, -120.0, 1e4, -1e4}) {
    for (const bool swapped : {false, true}) {
      const OwnedSoftmaxState near_state(GetParam(), 1, 1, 1, 1), far_state(GetParam(), 1, 1, 1, 1);
      set_row(near_state.state(), 0, {0, 0, 0, 0}, {1, 2, 3, 4});
      set_row(far_state.state(), 0, {far, far, far, far}, {5, 6, 7, 8});
      const SoftmaxState& into = swapped ? far_state.state() : near_state.state();
      merge(swapped ? near_state.state() : far_state.state(), into);
      const Finished got = finished(into, GetParam());
      EXPECT_NEAR(got.out.data[0], far > 0 ? 6.5 : 2.5, 1e-6);
      const double lse = std::max(far, 0.0) + std::log(4.0);
      EXPECT_NEAR(got.lse.data[0], lse, tolerance() * std::max(1.0, lse));
    }
  }
}

TEST_P(SoftmaxStateTest, TwoEmptyRowsJoinToAnEmptyRow) {
  const OwnedSoftmaxState a(GetParam(), 1, 1, 1, 2), b(GetParam(), 1, 1, 1, 2);
  merge(a.state(), b.state());
  const Finished got = finished(b.state(), GetParam());
  EXPECT_EQ(got.out.data, std::vector<double>(2, 0.0));
  EXPECT_EQ(got.lse.data[0], -kInfinity);
}

TEST_P(SoftmaxStateTest, SetIdentityForgetsWhatWasThere) {
  const OwnedSoftmaxState a(GetParam(), 1, 1, 1, 1);
  set_row(a.state(), 0, {kInfinity}, {3});
  set_identity(a.state());
  EXPECT_EQ(finished(a.state(), GetParam()).lse.data[0], -kInfinity);
  EXPECT_EQ(finished(a.state(), GetParam()).out.data[0], 0);
}

TEST_P(SoftmaxStateTest, OutIsRoundedOnceToTheCallsType) {
  const OwnedSoftmaxState a(GetParam(), 1, 1, 1, 1);
  set_row(a.state(), 0, {0, 0, 0}, {1, 0, 0});
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    EXPECT_EQ(finished(a.state(), dtype).out.data[0], test::rounded(1.0 / 3.0, dtype));
  }
}

TEST_P(SoftmaxStateTest, StridedStatesMergeLikeDenseOnes) {
  const DType dtype = GetParam();
  const std::array<int64_t, 4> size{2, 3, 4, 5}, stats{2, 3, 4, 1};
  const test::Array max1 = test::random_array(1, stats, dtype), max2 = test::random_array(2, stats, dtype);
  const test::Array acc1 = test::random_array(3, size, dtype), acc2 = test::random_array(4, size, dtype);
  std::vector<test::Array> results;
  for (const bool strided : {false, true}) {
    const std::array<int, 4> order = strided ? std::array{3, 2, 0, 1} : std::array{0, 1, 2, 3};
    const int64_t gap = strided ? 3 : 1;
    test::Tensor m1(max1, dtype, order, gap), m2(max2, dtype, order, gap), a1(acc1, dtype, order, gap),
        a2(acc2, dtype, order, gap), l1(test::Array(stats, 1.5), dtype, order), l2(test::Array(stats, 2.5), dtype);
    merge({m1.view(), l1.view(), a1.view()}, {m2.view(), l2.view(), a2.view()});
    results.push_back(a2.array());
  }
  EXPECT_EQ(results[0].data, results[1].data);
}

TEST_P(SoftmaxStateTest, RefusesStatesOfDifferentSizes) {
  const OwnedSoftmaxState a(GetParam(), 1, 1, 3, 1), b(GetParam(), 1, 1, 4, 1);
  EXPECT_THROW(merge(a.state(), b.state()), Error);
}

INSTANTIATE_TEST_SUITE_P(Accumulators, SoftmaxStateTest, ::testing::Values(DType::kF32, DType::kF64),
                         [](const auto& param) { return name_of(param.param); });

}  // namespace
}  // namespace ringspan
