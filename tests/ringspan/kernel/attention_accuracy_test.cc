// Every kernel against the oracle, over sizes, dtypes, masks and head groupings. The full product would run for hours;
// instead case i takes the i-th value of each list, at strides that have no common divisor with the lists' lengths, so
// that every value meets most values of the other lists.
#include <algorithm>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/attention_case.h"

namespace ringspan::test {
namespace {

constexpr int64_t kDims[] = {64, 1, 128, 3, 80, 8, 33, 16, 192, 24, 100, 256, 300, 768};
constexpr int64_t kLengths[] = {192, 31, 257, 1, 255, 7, 193, 2, 400, 191, 0, 256};
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF64, DType::kF16, DType::kBF16};
struct Heads {
  int64_t q_heads, kv_heads;
};
constexpr Heads kHeads[] = {{2, 2}, {4, 2}, {6, 1}, {1, 1}, {3, 3}, {4, 4}, {8, 2}};

// Multiply-adds of one product of the oracle, and as much for making the inputs. Above the limit a case gives up heads,
// then rows.
constexpr int64_t kMaxWork = 12'000'000;

int64_t work_of(const CaseSpec& spec) {
  const int64_t dim = std::max(spec.qk_dim, spec.v_dim);
  return spec.batch * spec.q_heads * dim * (spec.q_len * spec.kv_len + 50 * (spec.q_len + spec.kv_len));
}

CaseSpec case_of(int64_t i) {
  CaseSpec spec;
  spec.qk_dim = kDims[i % 14];
  spec.v_dim = i % 3 == 0 ? spec.qk_dim : kDims[(5 * i + 3) % 14];
  spec.q_len = kLengths[(i + i / 12) % 12];
  spec.kv_len = kLengths[(7 * i + 3 * (i / 12)) % 12];
  spec.dtype = kDTypes[(i + i / 5) % 5];
  spec.mask = kAllMasks[(3 * i + i / 10) % 10];
  spec.q_heads = kHeads[(2 * i + i / 7) % 7].q_heads;
  spec.kv_heads = kHeads[(2 * i + i / 7) % 7].kv_heads;
  spec.batch = 1 + (i + i / 3) % 3;
  spec.seed = static_cast<uint64_t>(i + 1);
  if (work_of(spec) > kMaxWork) spec.batch = 1;
  if (work_of(spec) > kMaxWork) spec.q_heads = 2, spec.kv_heads = 1;
  while (work_of(spec) > kMaxWork) (spec.q_len > spec.kv_len ? spec.q_len : spec.kv_len) /= 2;
  return spec;
}

std::vector<CaseSpec> accuracy_cases() {
  std::vector<CaseSpec> cases;
  for (int64_t i = 0; i < 84; ++i) cases.push_back(case_of(i));
  // What the product above must not miss: each common head dim, full and causal, at the block edges.
  for (const DType dtype : kDTypes) {
    for (const int64_t dim : {64, 128}) {
      cases.push_back({.dtype = dtype,
                       .q_heads = 2,
                       .kv_heads = 1,
                       .q_len = 400,
                       .kv_len = 400,
                       .qk_dim = dim,
                       .v_dim = dim,
                       .mask = dim == 64 ? MaskKind::kCausal : MaskKind::kFull,
                       .seed = 200});
    }
  }
  return cases;
}

class AttentionAccuracyTest : public ::testing::TestWithParam<std::tuple<CaseSpec, Target>> {};

TEST_P(AttentionAccuracyTest, ForwardAndBackwardMatchTheOracle) {
  const auto& [spec, target] = GetParam();
  const auto c = make_case(spec);
  expect_accurate(*c, run_forward(*c, target.kernels));
  expect_accurate(*c, run_backward(*c, target.kernels));
}

// Every fourth case.
std::vector<CaseSpec> few_accuracy_cases() {
  const std::vector<CaseSpec> all = accuracy_cases();
  std::vector<CaseSpec> few;
  for (std::size_t i = 0; i < all.size(); i += 4) few.push_back(all[i]);
  return few;
}

std::string name_of_case(const ::testing::TestParamInfo<std::tuple<CaseSpec, Target>>& param) {
  return std::to_string(param.index) + "_" + std::get<0>(param.param).name() + "_" + std::get<1>(param.param).name;
}

INSTANTIATE_TEST_SUITE_P(Native, AttentionAccuracyTest,
                         ::testing::Combine(::testing::ValuesIn(accuracy_cases()),
                                            ::testing::ValuesIn(native_targets())),
                         name_of_case);
// Emulation is slow.
INSTANTIATE_TEST_SUITE_P(Added, AttentionAccuracyTest,
                         ::testing::Combine(::testing::ValuesIn(few_accuracy_cases()),
                                            ::testing::ValuesIn(added_targets())),
                         name_of_case);

// The reference answers to the oracle too, or it could not judge anything.
class AttentionReferenceTest : public ::testing::TestWithParam<MaskKind> {};

TEST_P(AttentionReferenceTest, MatchesTheOracle) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    const auto c = make_case({.dtype = dtype,
                              .batch = 2,
                              .q_heads = 4,
                              .kv_heads = 2,
                              .q_len = 21,
                              .kv_len = 34,
                              .qk_dim = 5,
                              .v_dim = 3,
                              .mask = GetParam()});
    expect_accurate(*c, run_forward(*c, reference_kernels()));
    expect_accurate(*c, run_forward(*c, reference_kernels(), {.order = {2, 0, 3, 1}, .gap = 2, .num_calls = 3}));
    expect_accurate(*c, run_backward(*c, reference_kernels(), {.num_calls = 2}));
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, AttentionReferenceTest, ::testing::ValuesIn(kAllMasks),
                         [](const auto& param) { return name_of(param.param); });

// Kernels against the reference directly: two judges that share no code must agree on the same call.
TEST(AttentionJudgesTest, KernelsMatchTheReference) {
  const auto c = make_case({.batch = 2,
                            .q_heads = 4,
                            .kv_heads = 2,
                            .q_len = 70,
                            .kv_len = 45,
                            .qk_dim = 24,
                            .v_dim = 16,
                            .mask = MaskKind::kStrided,
                            .scale = 0.31});
  const ForwardResult want = run_forward(*c, reference_kernels());
  const BackwardResult want_grads = run_backward(*c, reference_kernels());
  for (const Target& target : all_targets()) {
    const ForwardResult got = run_forward(*c, target.kernels);
    EXPECT_LE(max_error(got.out, want.out), 1e-5);
    EXPECT_LE(max_error(got.max, want.max), 1e-5);
    EXPECT_LE(max_error(got.sum, want.sum), 1e-5);
    EXPECT_LE(max_error(got.lse, want.lse), 1e-5);
    const BackwardResult grads = run_backward(*c, target.kernels);
    EXPECT_LE(max_error(grads.dq, want_grads.dq), 5e-5);
    EXPECT_LE(max_error(grads.dk, want_grads.dk), 5e-5);
    EXPECT_LE(max_error(grads.dv, want_grads.dv), 5e-5);
  }
}

}  // namespace
}  // namespace ringspan::test
