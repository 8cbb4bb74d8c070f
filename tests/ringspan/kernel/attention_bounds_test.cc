// Kernels touch no byte outside of the rows that tiles cover: everything beside them lies on pages that trap.
//
//     trap | rows before | covered rows | rows behind | trap        tensor of S rows, only the covered ones accessible:
//     ------------------- xxxxxxxxxxxxxx -------------------         their first byte begins a page, or their last byte
//                                                                    ends one
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/attention_case.h"

namespace ringspan::test {
namespace {

enum class Edge { kBegin, kEnd };

// One head of `rows` rows, of which [begin, end) can be touched.
class GuardedRows {
 public:
  GuardedRows(DType dtype, int64_t rows, int64_t dim, int64_t begin, int64_t end, Edge edge)
      : row_bytes_(dim * size_of(dtype)) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const auto up = [page](int64_t bytes) { return (bytes + page - 1) / page * page; };
    const int64_t covered = (end - begin) * row_bytes_, inside = up(covered);
    const int64_t before = up(begin * row_bytes_ + 1), behind = up((rows - end) * row_bytes_ + 1);
    bytes_ = static_cast<std::size_t>(before + inside + behind);
    base_ = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(base_, MAP_FAILED);
    auto* open = static_cast<std::byte*>(base_) + before;
    EXPECT_EQ(mprotect(open, static_cast<std::size_t>(inside), PROT_READ | PROT_WRITE), 0);
    first_ = edge == Edge::kBegin ? open : open + inside - covered;
    view_ = view_of(first_ - begin * row_bytes_, dtype, Layout::kBNSD, {1, 1, rows, dim});
    covered_bytes_ = static_cast<std::size_t>(covered);
  }
  ~GuardedRows() { munmap(base_, bytes_); }
  GuardedRows(const GuardedRows&) = delete;
  GuardedRows& operator=(const GuardedRows&) = delete;

  const TensorView& view() const { return view_; }
  void fill(const std::vector<double>& values, int64_t first_value) {
    const int64_t count = static_cast<int64_t>(covered_bytes_) / size_of(view_.dtype);
    const ConstTensorView from = view_of(values.data() + first_value, DType::kF64, Layout::kBNSD, {1, 1, 1, count});
    copy(from, view_of(first_, view_.dtype, Layout::kBNSD, {1, 1, 1, count}));
  }
  std::vector<std::byte> bytes() const { return {first_, first_ + covered_bytes_}; }

 private:
  int64_t row_bytes_;
  void* base_ = nullptr;
  std::size_t bytes_ = 0, covered_bytes_ = 0;
  std::byte* first_ = nullptr;
  TensorView view_;
};

std::vector<double> random_values(int64_t count, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& value : values) value = normal(generator);
  return values;
}

constexpr int64_t kQueries = 37, kKeys = 141;
struct Rows {
  int64_t begin, end;
};
constexpr Rows kAllQueries{0, kQueries}, kAllKeys{0, kKeys};

// Everything of one call; inputs accessible at `q` and `kv` only.
class GuardedCall {
 public:
  GuardedCall(DType dtype, int64_t qk_dim, int64_t v_dim, Rows q, Rows kv, Edge edge)
      : q_(dtype, kQueries, qk_dim, q.begin, q.end, edge),
        k_(dtype, kKeys, qk_dim, kv.begin, kv.end, edge),
        v_(dtype, kKeys, v_dim, kv.begin, kv.end, edge),
        dout_(dtype, kQueries, v_dim, q.begin, q.end, edge),
        lse_(accumulator_of(dtype), kQueries, 1, q.begin, q.end, edge),
        delta_(accumulator_of(dtype), kQueries, 1, q.begin, q.end, edge),
        out_(dtype, kQueries, v_dim, 0, kQueries, edge),
        max_(accumulator_of(dtype), kQueries, 1, 0, kQueries, edge),
        sum_(accumulator_of(dtype), kQueries, 1, 0, kQueries, edge),
        out_lse_(accumulator_of(dtype), kQueries, 1, 0, kQueries, edge),
        dq_(accumulator_of(dtype), kQueries, qk_dim, 0, kQueries, edge),
        dk_(accumulator_of(dtype), kKeys, qk_dim, 0, kKeys, edge),
        dv_(accumulator_of(dtype), kKeys, v_dim, 0, kKeys, edge) {
    q_.fill(random_values(kQueries * qk_dim, 1), q.begin * qk_dim);
    k_.fill(random_values(kKeys * qk_dim, 2), kv.begin * qk_dim);
    v_.fill(random_values(kKeys * v_dim, 3), kv.begin * v_dim);
    dout_.fill(random_values(kQueries * v_dim, 4), q.begin * v_dim);
    lse_.fill(random_values(kQueries, 5), q.begin);
    delta_.fill(random_values(kQueries, 6), q.begin);
  }

  void run(const Kernels& kernels, const std::vector<Tile>& tiles) {
    Workspace workspace;
    ForwardArgs forward;
    forward.q = q_.view(), forward.k = k_.view(), forward.v = v_.view();
    forward.tiles = tiles;
    forward.output = {out_.view(), max_.view(), sum_.view(), out_lse_.view()};
    kernels.forward(forward, workspace, Serial());
    BackwardArgs backward;
    backward.q = q_.view(), backward.k = k_.view(), backward.v = v_.view(), backward.dout = dout_.view();
    backward.lse = lse_.view(), backward.delta = delta_.view();
    backward.tiles = tiles;
    backward.dq = dq_.view(), backward.dk = dk_.view(), backward.dv = dv_.view();
    kernels.backward(backward, workspace, Serial());
  }

  std::vector<std::vector<std::byte>> results() const {
    return {out_.bytes(), max_.bytes(), sum_.bytes(), out_lse_.bytes(), dq_.bytes(), dk_.bytes(), dv_.bytes()};
  }

 private:
  GuardedRows q_, k_, v_, dout_, lse_, delta_, out_, max_, sum_, out_lse_, dq_, dk_, dv_;
};

class AttentionBoundsTest : public ::testing::TestWithParam<std::tuple<Target, DType>> {};

TEST_P(AttentionBoundsTest, OnlyCoveredRowsAreTouched) {
  const auto& [target, dtype] = GetParam();
  // Rows 5..29 see keys 3..129 causally; then 1 row and 2 keys, which take the path of few rows.
  const Tile block{.q_row0 = 5, .q_rows = 25, .kv_row0 = 3, .kv_rows = 127, .kv_pos0 = -100, .lo = -1000, .hi = 0};
  const Tile few{.q_row0 = 7, .q_rows = 1, .kv_row0 = 40, .kv_rows = 2, .lo = -1000, .hi = 1000};
  for (const Tile& tile : {block, few}) {
    for (const auto& [qk_dim, v_dim] : {std::pair(1, 3), {8, 8}, {20, 5}, {64, 64}, {100, 33}}) {
      GuardedCall open(dtype, qk_dim, v_dim, kAllQueries, kAllKeys, Edge::kBegin);
      open.run(target.kernels, {tile});
      for (const Edge edge : {Edge::kBegin, Edge::kEnd}) {
        GuardedCall guarded(dtype, qk_dim, v_dim, {tile.q_row0, tile.q_row0 + tile.q_rows},
                            {tile.kv_row0, tile.kv_row0 + tile.kv_rows}, edge);
        guarded.run(target.kernels, {tile});
        EXPECT_EQ(guarded.results(), open.results()) << qk_dim << " " << v_dim;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionBoundsTest,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::Values(DType::kF32, DType::kBF16, DType::kF16, DType::kF64)),
                         [](const auto& param) {
                           return std::get<0>(param.param).name + "_" + name_of(std::get<1>(param.param));
                         });

}  // namespace
}  // namespace ringspan::test
