#include "ringspan/kernel/workspace.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/attention_case.h"

namespace ringspan {
namespace {

TEST(WorkspaceTest, GrowsAndKeepsItsBlock) {
  Workspace workspace;
  EXPECT_EQ(workspace.capacity(), 0u);
  std::byte* small = workspace.reserve(1000);
  ASSERT_NE(small, nullptr);
  EXPECT_GE(workspace.capacity(), 1000u);
  EXPECT_EQ(workspace.reserve(500), small);
  EXPECT_EQ(workspace.reserve(workspace.capacity()), small);
  const std::size_t wanted = workspace.capacity() + 1;
  std::byte* large = workspace.reserve(wanted);
  EXPECT_GE(workspace.capacity(), wanted);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(large) % 64, 0u);
  std::memset(large, 1, wanted);
}

TEST(WorkspaceTest, TheBudgetFits) {
  Workspace workspace;
  workspace.reserve(Workspace::kBudgetBytes);
  EXPECT_EQ(workspace.capacity(), Workspace::kBudgetBytes);
}

TEST(WorkspacePoolTest, GivesBackWhatWasUsed) {
  WorkspacePool pool;
  const std::byte* block = nullptr;
  {
    const WorkspacePool::Lease lease = pool.take();
    block = (*lease).reserve(100);
  }
  {
    const WorkspacePool::Lease lease = pool.take();
    EXPECT_EQ((*lease).reserve(100), block);
    const WorkspacePool::Lease other = pool.take();
    EXPECT_EQ((*other).capacity(), 0u);
  }
  pool.clear();
  EXPECT_EQ((*pool.take()).capacity(), 0u);
}

TEST(WorkspacePoolTest, KeepsABoundedNumber) {
  WorkspacePool pool;
  constexpr std::size_t kTaken = WorkspacePool::kMaxIdle + 2;
  {
    std::vector<std::unique_ptr<const WorkspacePool::Lease>> leases;
    for (std::size_t i = 0; i < kTaken; ++i) {
      leases.emplace_back(new WorkspacePool::Lease(pool.take()));
      (**leases.back()).reserve(1);
    }
  }
  std::vector<std::unique_ptr<const WorkspacePool::Lease>> leases;
  std::size_t num_used = 0;
  for (std::size_t i = 0; i < kTaken; ++i) {
    leases.emplace_back(new WorkspacePool::Lease(pool.take()));
    num_used += (**leases.back()).capacity() > 0 ? 1 : 0;
  }
  EXPECT_EQ(num_used, WorkspacePool::kMaxIdle);
}

TEST(WorkspacePoolTest, ThreadsNeverShareOne) {
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([thread] {
      for (int round = 0; round < 50; ++round) {
        const WorkspacePool::Lease lease = WorkspacePool::process().take();
        std::byte* data = (*lease).reserve(4096);
        std::memset(data, thread, 4096);
        std::this_thread::yield();
        for (int i = 0; i < 4096; ++i) ASSERT_EQ(data[i], static_cast<std::byte>(thread));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  WorkspacePool::process().clear();
}

// Claims so many threads that per-thread memory shows, and runs nothing at the same time.
class ManyThreads final : public Parallel {
 public:
  int num_threads() const override { return 128; }
  void run(int num_tasks, const std::function<void(int)>& task) const override { Serial().run(num_tasks, task); }
};

struct Shape {
  DType dtype;
  int64_t batch, q_heads, kv_heads, q_len, kv_len, dim;
  int64_t lo;  // of the band, which keeps the run short; hi = 0
};

// Long sequences, many heads, wide heads, one query, many rows on few keys. Narrow bands keep the run short, and the
// data may all lie in one expanded row, for nothing here looks at values.
TEST(KernelMemoryTest, StaysInTheBudgetWhateverTheProblem) {
  const Shape shapes[] = {
      {DType::kF32, 1, 1, 1, 50000, 50000, 16, -4},    {DType::kBF16, 1, 2, 1, 20000, 20000, 64, -4},
      {DType::kF64, 1, 2, 1, 700, 700, 768, -4},       {DType::kF32, 1, 1, 1, 1, 150000, 64, -150000},
      {DType::kBF16, 1, 16, 4, 1, 40000, 128, -40000}, {DType::kF32, 4, 32, 8, 300, 300, 64, -4},
      {DType::kF64, 1, 64, 1, 200, 200, 128, -4},      {DType::kF32, 1, 1, 1, 30000, 7, 64, -30000}};
  const ManyThreads parallel;
  for (const Shape& s : shapes) {
    const Tile tile{.batch = 0,
                    .q_row0 = 0,
                    .q_rows = s.q_len,
                    .q_pos0 = std::max<int64_t>(s.kv_len - s.q_len, 0),
                    .q_stride = 1,
                    .kv_row0 = 0,
                    .kv_rows = s.kv_len,
                    .kv_pos0 = 0,
                    .kv_stride = 1,
                    .lo = s.lo,
                    .hi = 0};
    std::vector<Tile> tiles(static_cast<std::size_t>(s.batch), tile);
    for (int64_t b = 0; b < s.batch; ++b) tiles[static_cast<std::size_t>(b)].batch = b;
    const DType wide = accumulator_of(s.dtype);
    const std::vector<std::byte> row(static_cast<std::size_t>(s.dim * size_of(wide)));
    const auto expanded = [&](DType dtype, int64_t heads, int64_t rows, int64_t dim) {
      return ConstTensorView{row.data(), dtype, {s.batch, heads, rows, dim}, {0, 0, 0, 1}};
    };
    const ConstTensorView q = expanded(s.dtype, s.q_heads, s.q_len, s.dim),
                          k = expanded(s.dtype, s.kv_heads, s.kv_len, s.dim);
    test::Tensor out(s.dtype, q.size), dq(wide, q.size), dk(wide, k.size), dv(wide, k.size);
    test::Tensor max(wide, {s.batch, s.q_heads, s.q_len, 1}), sum(wide, max.view().size), lse(wide, max.view().size);
    Workspace workspace;
    ForwardArgs forward{.q = q,
                        .k = k,
                        .v = k,
                        .tiles = tiles,
                        .state = {},
                        .output = {out.view(), max.view(), sum.view(), lse.view()}};
    attend(forward, workspace, parallel);
    EXPECT_LE(workspace.capacity(), Workspace::kBudgetBytes);
    BackwardArgs backward{.q = q,
                          .k = k,
                          .v = k,
                          .dout = q,
                          .lse = lse.view(),
                          .delta = lse.view(),
                          .tiles = tiles,
                          .dq = dq.view(),
                          .dk = dk.view(),
                          .dv = dv.view(),
                          .before_accumulate = {}};
    attend_backward(backward, workspace, parallel);
    EXPECT_LE(workspace.capacity(), Workspace::kBudgetBytes);
  }
}

}  // namespace
}  // namespace ringspan
