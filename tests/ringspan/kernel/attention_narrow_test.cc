// Masks that keep few keys for each query block (kernel/narrow_call.h): many key blocks, so that a buffer of packed
// keys begins anew, and workers that pack the same block twice.
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/attention_case.h"

namespace ringspan::test {
namespace {

// Dims so large that a key block has few columns: 2000 rows are 16 to 63 of them, and query blocks meet 2 to 9.
constexpr int64_t kRows = 2000;

CaseSpec spec_of(DType dtype, MaskKind mask) {
  return {.dtype = dtype,
          .batch = 2,
          .q_heads = 4,
          .kv_heads = 2,
          .q_len = kRows,
          .kv_len = kRows,
          .qk_dim = 288,
          .v_dim = 264,
          .mask = mask};
}

class AttentionNarrowTest : public ::testing::TestWithParam<Target> {
 protected:
  void SetUp() override {
    if (GetParam().is_slow) GTEST_SKIP() << "emulated: minutes";
  }
  const Kernels& kernels() const { return GetParam().kernels; }
};

TEST_P(AttentionNarrowTest, IsExactAndThreadsChangeNoBit) {
  std::vector<std::unique_ptr<const Parallel>> pools;
  for (const int num_threads : {2, 5, 40}) pools.push_back(std::make_unique<ThreadPool>(num_threads));
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    for (const MaskKind mask : {MaskKind::kDocuments, MaskKind::kWindow, MaskKind::kShifted}) {
      const auto c = make_case(spec_of(dtype, mask));
      SCOPED_TRACE(c->spec.name());
      const ForwardResult want = run_forward(*c, kernels());
      expect_accurate(*c, want);
      for (const auto& pool : pools) expect_same(run_forward(*c, kernels(), {.parallel = pool.get()}), want);
    }
  }
}

// Each call sees part of the keys, so that rows go on from a state, some without a key of their own.
TEST_P(AttentionNarrowTest, PartsOfTheKeysAddUpToTheWhole) {
  const ThreadPool pool(2);
  for (const MaskKind mask : {MaskKind::kDocuments, MaskKind::kWindow}) {
    const auto c = make_case(spec_of(DType::kF32, mask));
    expect_accurate(*c, run_forward(*c, kernels(), {.num_calls = 3, .parallel = &pool}));
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionNarrowTest, ::testing::ValuesIn(all_targets()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace ringspan::test
