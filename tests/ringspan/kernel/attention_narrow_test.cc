// Masks that keep few keys for each query block (kernel/narrow_call.h): many key blocks, so that a buffer of packed
// keys begins anew, and workers that pack the same block twice.
#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/attention_case.h"
#include "tests/ringspan/support/sanitized.h"

namespace ringspan::test {
namespace {

// Dims so large that a key block has few columns: 1500 rows are 23 of them or more, and query blocks meet a fifth.
constexpr int64_t kRows = 1500;

CaseSpec spec_of(DType dtype, MaskKind mask) {
  return {.dtype = dtype,
          .batch = 2,
          .q_heads = 2,
          .kv_heads = 1,
          .q_len = kRows,
          .kv_len = kRows,
          .qk_dim = 768,
          .v_dim = 750,
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
  for (const auto& [dtype, mask] : {std::pair(DType::kF32, MaskKind::kDocuments),
                                    {DType::kBF16, MaskKind::kDocuments},
                                    {DType::kF64, MaskKind::kWindow}}) {
    if (kIsSanitized && dtype != DType::kF32) continue;
    const auto c = make_case(spec_of(dtype, mask));
    SCOPED_TRACE(c->spec.name());
    const ForwardResult want = run_forward(*c, kernels());
    expect_accurate(*c, want);
    for (const auto& pool : pools) expect_same(run_forward(*c, kernels(), {.parallel = pool.get()}), want);
  }
}

// Each call sees part of the keys, so that rows go on from a state, some without a key of their own.
TEST_P(AttentionNarrowTest, PartsOfTheKeysAddUpToTheWhole) {
  const ThreadPool pool(2);
  const auto c = make_case(spec_of(DType::kF32, MaskKind::kDocuments));
  expect_accurate(*c, run_forward(*c, kernels(), {.num_calls = 3, .parallel = &pool}));
}

// The rows [begin, end) of a case and their tiles as a call of their own, in fixed order.
Array rows_alone(const AttentionCase& c, const Kernels& kernels, int64_t begin, int64_t end) {
  const DType dtype = c.spec.dtype;
  const Tensor q(c.inputs.q, dtype), k(c.inputs.k, dtype), v(c.inputs.v, dtype);
  std::vector<Tile> tiles;
  for (Tile tile : c.tiles) {
    const int64_t first = std::max(tile.q_row0, begin), last = std::min(tile.q_row0 + tile.q_rows, end);
    if (first >= last) continue;
    tile.q_pos0 += (first - tile.q_row0) * tile.q_stride;
    tile.q_row0 = first - begin;
    tile.q_rows = last - first;
    tiles.push_back(tile);
  }
  std::array<int64_t, 4> out_size = c.want.out.size, row_size = c.want.lse.size;
  out_size[2] = row_size[2] = end - begin;
  Tensor out(dtype, out_size);
  const DType sums = accumulator_of(dtype);
  Tensor max(sums, row_size), sum(sums, row_size), lse(sums, row_size);
  Workspace workspace;
  kernels.forward({.q = narrow(q.view(), 2, begin, end),
                   .k = k.view(),
                   .v = v.view(),
                   .tiles = tiles,
                   .scale = c.inputs.scale,
                   .state = {},
                   .output = {out.view(), max.view(), sum.view(), lse.view()},
                   .fixed_order = true},
                  workspace, Serial());
  return out.array();
}

// One query block is too few jobs for a narrow call, so that the same rows go by waves: the schedule "invariant" may
// see either, and asks for the same bits.
TEST_P(AttentionNarrowTest, FixedOrderGivesTheBitsOfAWave) {
  constexpr int64_t kBlock = 192;
  if (kIsSanitized) GTEST_SKIP() << "the same memory as above";
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto c = make_case(spec_of(dtype, MaskKind::kDocuments));
    const Array whole = rows_alone(*c, kernels(), 0, kRows);
    for (const int64_t begin : {int64_t{0}, 3 * kBlock, 6 * kBlock}) {
      const Array part = rows_alone(*c, kernels(), begin, begin + kBlock);
      EXPECT_TRUE(same_bits(part, picked(whole, {.first = begin, .count = kBlock})))
          << c->spec << " from row " << begin;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionNarrowTest, ::testing::ValuesIn(all_targets()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace ringspan::test
