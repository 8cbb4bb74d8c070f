// The laws of the softmax state (ringspan/softmax/softmax_state.h), on states that attend() begins, joins and finishes:
// call by call and, for many keys, part by part inside a call.
//
// Queries are 1 and the scale is 1, so the score of key j is k[j]: every row has the same scores, given here.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/attention_case.h"

namespace ringspan::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kOpen = int64_t{1} << 60;

struct Keys {
  std::vector<double> scores, values;

  int64_t count() const { return static_cast<int64_t>(scores.size()); }
};

// Scores and values that every accumulator type holds exactly.
Keys varied_keys(int64_t count) {
  Keys keys;
  for (int64_t j = 0; j < count; ++j) {
    keys.scores.push_back(static_cast<double>(j * 37 % 101 - 50) / 16);
    keys.values.push_back(static_cast<double>(j * 53 % 89 - 44) / 8);
  }
  return keys;
}

// Keys [begin, end).
struct Part {
  int64_t begin, end;
};
// The parts that each call brings.
using Calls = std::vector<std::vector<Part>>;

struct LawOptions {
  DType dtype = DType::kF32;
  int64_t rows = 1;
  std::vector<double> sink{};            // one, or none
  std::array<int, 4> order{0, 1, 2, 3};  // memory order of the state
  int64_t gap = 1;
};

constexpr int64_t kValueDim = 3;

Array constant(std::array<int64_t, 4> size, double value) { return Array(size, value); }

// Values v, -v and 1: the last output of a row that keeps something is 1.
Array values_of(const Keys& keys) {
  Array v({1, 1, keys.count(), kValueDim});
  for (int64_t j = 0; j < keys.count(); ++j) {
    v.at(0, 0, j, 0) = keys.values[j];
    v.at(0, 0, j, 1) = -keys.values[j];
    v.at(0, 0, j, 2) = 1;
  }
  return v;
}

ForwardResult attend_calls(const Kernels& kernels, const Keys& keys, const Calls& calls, const LawOptions& options) {
  const DType dtype = options.dtype, wide = accumulator_of(dtype);
  const std::array<int64_t, 4> stats{1, 1, options.rows, 1}, outs{1, 1, options.rows, kValueDim};
  const Tensor q(constant(stats, 1), dtype), k(array_of({1, 1, keys.count(), 1}, keys.scores), dtype);
  const Tensor v(values_of(keys), dtype);
  const Tensor sink = options.sink.empty() ? Tensor() : Tensor(array_of({1, 1, 1, 1}, options.sink), wide);
  Tensor state_max(wide, stats, options.order, options.gap, NAN), state_sum(wide, stats, options.order, 1, NAN),
      acc(wide, outs, options.order, options.gap, NAN);
  Tensor out(dtype, outs), max(wide, stats), sum(wide, stats), lse(wide, stats);
  Workspace workspace;
  for (std::size_t call = 0; call < calls.size(); ++call) {
    std::vector<Tile> tiles;
    for (const Part& part : calls[call]) {
      tiles.push_back({.q_rows = options.rows,
                       .kv_row0 = part.begin,
                       .kv_rows = part.end - part.begin,
                       .kv_pos0 = part.begin,
                       .lo = -kOpen,
                       .hi = kOpen});
    }
    const ForwardArgs args{.q = q.view(),
                           .k = k.view(),
                           .v = v.view(),
                           .tiles = tiles,
                           .state = {state_max.view(), state_sum.view(), acc.view()},
                           .begin = call == 0,
                           .finish = call + 1 == calls.size(),
                           .output = {out.view(), max.view(), sum.view(), lse.view()},
                           .sink = sink.view()};
    kernels.forward(args, workspace, Serial());
  }
  return {out.array(), max.array(), sum.array(), lse.array()};
}

struct Row {
  double out = 0, max = -kInfinity, sum = 0, lse = -kInfinity;
};

// All keys of the calls at once, in double.
Row row_of(const Keys& keys, const Calls& calls, const std::vector<double>& sink = {}) {
  std::vector<double> scores = sink, values(sink.size(), 0.0);
  for (const std::vector<Part>& parts : calls) {
    for (const Part& part : parts) {
      scores.insert(scores.end(), keys.scores.begin() + part.begin, keys.scores.begin() + part.end);
      values.insert(values.end(), keys.values.begin() + part.begin, keys.values.begin() + part.end);
    }
  }
  Row row;
  for (const double score : scores) row.max = std::max(row.max, score);
  if (row.max == -kInfinity) return row;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    row.sum += std::exp(scores[j] - row.max);
    row.out += std::exp(scores[j] - row.max) * values[j];
  }
  row.out /= row.sum;
  row.lse = row.max + std::log(row.sum);
  return row;
}

void expect_near(double got, double want, double tolerance) {
  if (std::isinf(want)) {
    EXPECT_EQ(got, want);
  } else {
    EXPECT_NEAR(got, want, tolerance * std::max(1.0, std::abs(want)));
  }
}

void expect_rows(const ForwardResult& got, const Row& want, DType dtype) {
  const double tolerance = accumulator_of(dtype) == DType::kF64 ? 1e-13 : 4e-6;
  for (int64_t s = 0; s < got.max.size[2]; ++s) {
    expect_near(got.out.at(0, 0, s, 0), want.out, tolerance);
    expect_near(got.out.at(0, 0, s, 1), -want.out, tolerance);
    EXPECT_EQ(got.max.at(0, 0, s), want.max);
    expect_near(got.sum.at(0, 0, s), want.sum, tolerance);
    expect_near(got.lse.at(0, 0, s), want.lse, tolerance);
  }
}

// With 1 row keys are read in place, with 40 as packed blocks; 3000 keys are cut into parts inside a call.
constexpr int64_t kRowCounts[] = {1, 40};

class SoftmaxLawsTest : public ::testing::TestWithParam<std::tuple<Target, DType>> {
 protected:
  const Kernels& kernels() const { return std::get<0>(GetParam()).kernels; }
  DType dtype() const { return std::get<1>(GetParam()); }
  ForwardResult run(const Keys& keys, const Calls& calls, LawOptions options = {}) const {
    options.dtype = dtype();
    return attend_calls(kernels(), keys, calls, options);
  }
};

TEST_P(SoftmaxLawsTest, TheIdentityFinishesAsTheEmptyRow) {
  for (const int64_t rows : kRowCounts) {
    for (const Calls& calls : {Calls{{}}, Calls{{}, {}}, Calls{{}, {}, {}}}) {
      const ForwardResult got = run(varied_keys(5), calls, {.rows = rows});
      for (const double out : got.out.data) EXPECT_EQ(out, 0);
      expect_rows(got, Row{}, dtype());
    }
  }
}

TEST_P(SoftmaxLawsTest, TheIdentityChangesNoBit) {
  for (const int64_t rows : kRowCounts) {
    for (const int64_t count : {6, 3000}) {
      const Keys keys = varied_keys(count);
      const ForwardResult want = run(keys, {{{0, count}}}, {.rows = rows});
      expect_same(run(keys, {{}, {{0, count}}}, {.rows = rows}), want);
      expect_same(run(keys, {{{0, count}}, {}}, {.rows = rows}), want);
    }
  }
}

TEST_P(SoftmaxLawsTest, PartsJoinInAnyOrderAndGrouping) {
  for (const int64_t count : {6, 3000}) {
    const Keys keys = varied_keys(count);
    const Part a{0, count / 3}, b{count / 3, count / 2}, c{count / 2, count};
    for (const Calls& calls : {Calls{{a, b, c}}, Calls{{a}, {b}, {c}}, Calls{{c}, {a}, {b}}, Calls{{a, b}, {c}},
                               Calls{{a}, {b, c}}, Calls{{b, c}, {a}}}) {
      for (const int64_t rows : kRowCounts) {
        expect_rows(run(keys, calls, {.rows = rows}), row_of(keys, calls), dtype());
      }
    }
  }
}

// e^120 is no float: whoever exponentiates a difference the wrong way round is seen.
TEST_P(SoftmaxLawsTest, FarApartMaximaStayFinite) {
  for (const double far : {120.0, -120.0, 1e4, -1e4}) {
    for (const int64_t count : {8, 3000}) {
      Keys keys = varied_keys(count);
      for (int64_t j = 0; j < count; ++j) keys.scores[j] = j < count / 2 ? 0 : far;
      const Part low{0, count / 2}, high{count / 2, count};
      for (const Calls& calls : {Calls{{low}, {high}}, Calls{{high}, {low}}, Calls{{{0, count}}}}) {
        for (const int64_t rows : kRowCounts) {
          expect_rows(run(keys, calls, {.rows = rows}), row_of(keys, calls), dtype());
        }
      }
    }
  }
}

TEST_P(SoftmaxLawsTest, ASinkIsOneMoreKeyWithoutAValueAndJoinsOnce) {
  const Keys keys = varied_keys(6);
  for (const double sink : {0.0, 3.0, -kInfinity, 1000.0, -1000.0}) {
    // Every call names the sink; only the last one ends the rows.
    for (const Calls& calls : {Calls{{{0, 6}}}, Calls{{{0, 2}}, {{2, 5}}, {{5, 6}}}, Calls{{}}, Calls{{}, {}}}) {
      for (const int64_t rows : kRowCounts) {
        expect_rows(run(keys, calls, {.rows = rows, .sink = {sink}}), row_of(keys, calls, {sink}), dtype());
      }
    }
  }
}

TEST_P(SoftmaxLawsTest, StridedStatesHoldTheSameBits) {
  const Keys keys = varied_keys(90);
  const Calls calls = {{{0, 30}}, {{30, 70}}, {{70, 90}}};
  for (const int64_t rows : kRowCounts) {
    const ForwardResult want = run(keys, calls, {.rows = rows});
    expect_same(run(keys, calls, {.rows = rows, .order = {3, 2, 0, 1}, .gap = 3}), want);
    expect_same(run(keys, calls, {.rows = rows, .order = {2, 1, 0, 3}, .gap = 2}), want);
  }
}

std::string name_of_laws(const ::testing::TestParamInfo<std::tuple<Target, DType>>& info) {
  return std::get<0>(info.param).name + "_" + ringspan::name_of(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Targets, SoftmaxLawsTest,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::Values(DType::kF32, DType::kF64)),
                         name_of_laws);

class SoftmaxRoundingTest : public ::testing::TestWithParam<Target> {};

// 65 equal scores, values 1 and 64 times 2^-12, one key a call: a sum that any step rounded to 16 bits would stay 1.
TEST_P(SoftmaxRoundingTest, OutIsRoundedOnceToTheCallsType) {
  constexpr int64_t kCount = 65;
  Keys keys{std::vector<double>(kCount, 0.0), std::vector<double>(kCount, std::ldexp(1.0, -12))};
  keys.values[0] = 1;
  Calls calls;
  for (int64_t j = 0; j < kCount; ++j) calls.push_back({{j, j + 1}});
  const double want = (1 + std::ldexp(64.0, -12)) / static_cast<double>(kCount);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    ASSERT_NE(rounded(want, dtype), rounded(1.0 / static_cast<double>(kCount), dtype));
    for (const int64_t rows : kRowCounts) {
      const ForwardResult got = attend_calls(GetParam().kernels, keys, calls, {.dtype = dtype, .rows = rows});
      for (int64_t s = 0; s < rows; ++s) EXPECT_EQ(got.out.at(0, 0, s, 0), rounded(want, dtype));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, SoftmaxRoundingTest, ::testing::ValuesIn(all_targets()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace ringspan::test
