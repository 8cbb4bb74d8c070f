// What one attention call promises beyond its numbers: parts add up to the whole, and neither layout, threads, earlier
// calls nor repetition change a bit.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/attention_case.h"

namespace ringspan::test {
namespace {

// Claims to have many threads and runs the tasks in order on one.
class ManyThreadsInOrder final : public Parallel {
 public:
  explicit ManyThreadsInOrder(int num_threads) : num_threads_(num_threads) {}
  int num_threads() const override { return num_threads_; }
  void run(int num_tasks, const std::function<void(int)>& task) const override { Serial().run(num_tasks, task); }

 private:
  int num_threads_;
};

class AttentionCallsTest : public ::testing::TestWithParam<Target> {
 protected:
  Kernels kernels() const { return GetParam().kernels; }
};

TEST_P(AttentionCallsTest, PartsOfTheKeysAddUpToTheWhole) {
  const DType dtypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  for (int64_t i = 0; i < 10; ++i) {
    CaseSpec spec{.dtype = dtypes[i % 4],
                  .batch = 1 + i % 2,
                  .q_heads = 4,
                  .kv_heads = 2,
                  .q_len = 70 + 13 * i,
                  .kv_len = 310 - 29 * i,
                  .qk_dim = 24,
                  .v_dim = 40,
                  .mask = kAllMasks[i]};
    SCOPED_TRACE(spec.name());
    const auto c = make_case(spec);
    for (int64_t num_calls = 2; num_calls <= (GetParam().is_slow ? 2 : 4); ++num_calls) {
      expect_accurate(*c, run_forward(*c, kernels(), {.num_calls = num_calls}));
      expect_accurate(*c, run_backward(*c, kernels(), {.num_calls = num_calls, .is_announced = num_calls % 2 == 0}));
    }
  }
}

TEST_P(AttentionCallsTest, LayoutChangesNoBit) {
  const std::pair<std::array<int, 4>, int64_t> layouts[] = {{order_of(Layout::kBSND), 1},
                                                            {order_of(Layout::kBSH), 1},
                                                            {order_of(Layout::kSBH), 1},
                                                            {{0, 1, 3, 2}, 1},
                                                            {{3, 2, 1, 0}, 1},
                                                            {{1, 2, 0, 3}, 2}};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    for (const auto& [q_len, kv_len] : {std::pair<int64_t, int64_t>{75, 290}, {1, 300}}) {
      if (GetParam().is_slow && q_len > 1) continue;
      const auto c = make_case({.dtype = dtype,
                                .batch = 2,
                                .q_heads = 4,
                                .kv_heads = 2,
                                .q_len = q_len,
                                .kv_len = kv_len,
                                .qk_dim = 33,
                                .v_dim = 64,
                                .mask = MaskKind::kBottomRight});
      const ForwardResult want = run_forward(*c, kernels());
      const BackwardResult want_grads = run_backward(*c, kernels());
      for (const auto& [order, gap] : layouts) {
        expect_same(run_forward(*c, kernels(), {.order = order, .gap = gap}), want);
        expect_same(run_backward(*c, kernels(), {.order = order, .gap = gap}), want_grads);
      }
    }
  }
}

// The last shapes have few heads and rows, so that threads must share one row's keys, or one key block's rows.
TEST_P(AttentionCallsTest, ThreadsChangeNoBit) {
  std::vector<std::unique_ptr<const Parallel>> pools;
  for (const int num_threads : {2, 3, 5}) pools.push_back(std::make_unique<ThreadPool>(num_threads));
  pools.push_back(std::make_unique<ManyThreadsInOrder>(64));
  struct Shape {
    int64_t batch, q_heads, kv_heads, q_len, kv_len;
    MaskKind mask;
  };
  const Shape shapes[] = {{2, 4, 2, 200, 300, MaskKind::kCausal},     {1, 6, 1, 130, 400, MaskKind::kSplit},
                          {1, 1, 1, 400, 400, MaskKind::kCausal},     {1, 1, 1, 1, 3000, MaskKind::kFull},
                          {1, 1, 1, 3, 1500, MaskKind::kBottomRight}, {1, 1, 1, 900, 40, MaskKind::kFull},
                          {2, 8, 2, 1, 1100, MaskKind::kFull},        {1, 6, 1, 2, 1300, MaskKind::kScattered}};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : shapes) {
      if (GetParam().is_slow && shape.kv_len < 1000) continue;
      CaseSpec spec{.dtype = dtype,
                    .batch = shape.batch,
                    .q_heads = shape.q_heads,
                    .kv_heads = shape.kv_heads,
                    .q_len = shape.q_len,
                    .kv_len = shape.kv_len,
                    .qk_dim = 16,
                    .v_dim = 16,
                    .mask = shape.mask};
      SCOPED_TRACE(spec.name());
      const auto c = make_case(spec);
      const ForwardResult want = run_forward(*c, kernels());
      const BackwardResult want_grads = run_backward(*c, kernels());
      expect_accurate(*c, want);
      expect_accurate(*c, want_grads);
      for (const auto& pool : pools) {
        expect_same(run_forward(*c, kernels(), {.parallel = pool.get()}), want);
        expect_same(run_backward(*c, kernels(), {.parallel = pool.get()}), want_grads);
        expect_same(run_backward(*c, kernels(), {.parallel = pool.get(), .is_announced = true}), want_grads);
      }
    }
  }
}

// A workspace full of another call's data, NaN among it, is as good as a fresh one; nor does repetition matter.
TEST_P(AttentionCallsTest, EarlierCallsChangeNoBit) {
  const ThreadPool pool(3);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    const CaseSpec spec{.dtype = dtype,
                        .batch = 2,
                        .q_heads = 2,
                        .kv_heads = 1,
                        .q_len = 150,
                        .kv_len = 270,
                        .qk_dim = 20,
                        .v_dim = 36,
                        .mask = MaskKind::kDocuments};
    const auto c = make_case(spec);
    const ForwardResult want = run_forward(*c, kernels());
    const BackwardResult want_grads = run_backward(*c, kernels());
    Workspace workspace;
    std::byte* scratch = workspace.reserve(Workspace::kBudgetBytes);
    std::fill(scratch, scratch + (std::size_t{8} << 20), std::byte{0xFF});
    for (int repeat = 0; repeat < (GetParam().is_slow ? 1 : 5); ++repeat) {
      expect_same(run_forward(*c, kernels(), {.parallel = &pool, .workspace = &workspace}), want);
      expect_same(run_backward(*c, kernels(), {.parallel = &pool, .workspace = &workspace}), want_grads);
    }
  }
}

// The running state may live in the outputs themselves.
TEST_P(AttentionCallsTest, StateInTheOutputChangesNoBit) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    for (const int64_t q_len : {1, 60}) {
      const auto c = make_case({.dtype = dtype,
                                .batch = 2,
                                .q_heads = 4,
                                .kv_heads = 2,
                                .q_len = q_len,
                                .kv_len = 300,
                                .qk_dim = 8,
                                .v_dim = 12,
                                .mask = MaskKind::kBottomRight});
      const Tensor q(c->inputs.q, dtype), k(c->inputs.k, dtype), v(c->inputs.v, dtype);
      Tensor out(dtype, c->want.out.size), max(dtype, c->want.lse.size), sum(dtype, c->want.lse.size),
          lse(dtype, c->want.lse.size);
      Workspace workspace;
      for (int64_t call = 0; call < 3; ++call) {
        const std::vector<Tile> tiles = cut_tiles(c->tiles, 100 * call, 100 * (call + 1));
        ForwardArgs args{.q = q.view(),
                         .k = k.view(),
                         .v = v.view(),
                         .tiles = tiles,
                         .scale = c->inputs.scale,
                         .state = {max.view(), sum.view(), out.view()},
                         .begin = call == 0,
                         .finish = call == 2,
                         .output = {out.view(), max.view(), sum.view(), lse.view()}};
        kernels().forward(args, workspace, Serial());
      }
      expect_same(ForwardResult{out.array(), max.array(), sum.array(), lse.array()},
                  run_forward(*c, kernels(), {.num_calls = 3}));
    }
  }
}

TEST_P(AttentionCallsTest, WithoutTilesEveryRowIsEmpty) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    AttentionCase c({.dtype = dtype, .batch = 2, .q_heads = 4, .kv_heads = 2, .q_len = 9, .kv_len = 5});
    c.tiles.clear();
    const ForwardResult result = run_forward(c, kernels());
    for (const double value : result.out.data) ASSERT_EQ(value, 0);
    for (const double value : result.max.data) ASSERT_EQ(value, -INFINITY);
    for (const double value : result.sum.data) ASSERT_EQ(value, 0);
    for (const double value : result.lse.data) ASSERT_EQ(value, -INFINITY);
    const BackwardResult grads = run_backward(c, kernels());
    for (const double value : grads.dq.data) ASSERT_EQ(value, 0);
    for (const double value : grads.dk.data) ASSERT_EQ(value, 0);
    for (const double value : grads.dv.data) ASSERT_EQ(value, 0);
  }
}

// A call in the middle that brings nothing leaves the state as it was.
TEST_P(AttentionCallsTest, ACallWithoutTilesKeepsTheState) {
  const auto c =
      make_case({.batch = 1, .q_heads = 2, .kv_heads = 2, .q_len = 40, .kv_len = 30, .mask = MaskKind::kWindow});
  const Tensor q(c->inputs.q, DType::kF32), k(c->inputs.k, DType::kF32), v(c->inputs.v, DType::kF32);
  Tensor max(DType::kF32, {1, 2, 40, 1}), sum(DType::kF32, {1, 2, 40, 1}), acc(DType::kF32, {1, 2, 40, 16});
  ForwardArgs args{.q = q.view(),
                   .k = k.view(),
                   .v = v.view(),
                   .tiles = c->tiles,
                   .scale = c->inputs.scale,
                   .state = {max.view(), sum.view(), acc.view()},
                   .finish = false,
                   .output = {}};
  Workspace workspace;
  kernels().forward(args, workspace, Serial());
  const std::vector<std::byte> before[] = {max.bytes(), sum.bytes(), acc.bytes()};
  args.begin = false;
  args.tiles = {};
  kernels().forward(args, workspace, Serial());
  EXPECT_EQ(max.bytes(), before[0]);
  EXPECT_EQ(sum.bytes(), before[1]);
  EXPECT_EQ(acc.bytes(), before[2]);
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionCallsTest, ::testing::ValuesIn(all_targets()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace ringspan::test
