// Masks that keep few keys for each query block (kernel/narrow_call.cc): many key blocks, so that the slots of a buffer
// of packed keys serve one after the other, and workers that pack the same block twice.
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

// Query rows with tiles of their own against a case's keys, in fixed order.
Array attend_rows(const AttentionCase& c, const Kernels& kernels, const Array& rows, const std::vector<Tile>& tiles) {
  const DType dtype = c.spec.dtype;
  const Tensor q(rows, dtype), k(c.inputs.k, dtype), v(c.inputs.v, dtype);
  std::array<int64_t, 4> out_size = c.want.out.size, row_size = c.want.lse.size;
  out_size[2] = row_size[2] = rows.size[2];
  Tensor out(dtype, out_size);
  const DType sums = accumulator_of(dtype);
  Tensor max(sums, row_size), sum(sums, row_size), lse(sums, row_size);
  Workspace workspace;
  kernels.forward({.q = q.view(),
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

// Adds the parts of `tiles` that lie in rows [begin, end), moved to row `target`.
void add_moved(std::vector<Tile>& moved, const std::vector<Tile>& tiles, int64_t begin, int64_t end, int64_t target) {
  for (Tile tile : tiles) {
    const int64_t first = std::max(tile.q_row0, begin), last = std::min(tile.q_row0 + tile.q_rows, end);
    if (first >= last) continue;
    tile.q_pos0 += (first - tile.q_row0) * tile.q_stride;
    tile.q_row0 = first - begin + target;
    tile.q_rows = last - first;
    moved.push_back(tile);
  }
}

constexpr int64_t kBlock = 192;

// One query block is too few jobs for a narrow call, so that the same rows go by waves: the schedule "invariant" may
// see either, and asks for the same bits.
TEST_P(AttentionNarrowTest, FixedOrderGivesTheBitsOfAWave) {
  if (kIsSanitized) GTEST_SKIP() << "the same memory as above";
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto c = make_case(spec_of(dtype, MaskKind::kDocuments));
    const Array whole = attend_rows(*c, kernels(), c->inputs.q, c->tiles);
    for (const int64_t begin : {int64_t{0}, 3 * kBlock, 6 * kBlock}) {
      std::vector<Tile> tiles;
      add_moved(tiles, c->tiles, begin, begin + kBlock, 0);
      const Pick run{.first = begin, .count = kBlock};
      EXPECT_TRUE(same_bits(attend_rows(*c, kernels(), picked(c->inputs.q, run), tiles), picked(whole, run)))
          << c->spec << " from row " << begin;
    }
  }
}

// The query blocks in descending order.
Array descending(const Array& rows) {
  Array moved(rows.size);
  for_each_index(moved.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
    moved.at(b, n, s, d) = rows.at(b, n, rows.size[2] - kBlock - s / kBlock * kBlock + s % kBlock, d);
  });
  return moved;
}

// Then each needs keys before those that its worker has packed, some of the same key block.
TEST_P(AttentionNarrowTest, KeysMayComeInAnyOrder) {
  constexpr int64_t kWholeBlocks = 8 * kBlock;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    if (kIsSanitized && dtype != DType::kF32) continue;
    CaseSpec spec = spec_of(dtype, MaskKind::kWindow);
    spec.q_len = spec.kv_len = kWholeBlocks;
    const auto c = make_case(spec);
    std::vector<Tile> tiles;
    for (int64_t to = 0; to < kWholeBlocks; to += kBlock) {
      const int64_t from = kWholeBlocks - kBlock - to;
      add_moved(tiles, c->tiles, from, from + kBlock, to);
    }
    EXPECT_TRUE(same_bits(attend_rows(*c, kernels(), descending(c->inputs.q), tiles),
                          descending(attend_rows(*c, kernels(), c->inputs.q, c->tiles))))
        << c->spec;
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionNarrowTest, ::testing::ValuesIn(all_targets()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace ringspan::test
