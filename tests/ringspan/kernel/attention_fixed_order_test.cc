// fixed_order: the bits of a row stay what they are when other rows of its side leave the call. Every row is computed
// among all others and again among those that are left, on every instruction set, by its bits.
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"
#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/attention_case.h"
#include "tests/ringspan/support/sanitized.h"

namespace ringspan::test {
namespace {

struct Sizes {
  int64_t q_heads = 4, kv_heads = 2, q_len = 210, kv_len = 1500, qk_dim = 24, v_dim = 12;
};

struct Values {
  Values(DType dtype, const Sizes& s)
      : dtype(dtype),
        q(random_array(1, {1, s.q_heads, s.q_len, s.qk_dim}, dtype)),
        k(random_array(2, {1, s.kv_heads, s.kv_len, s.qk_dim}, dtype)),
        v(random_array(3, {1, s.kv_heads, s.kv_len, s.v_dim}, dtype)),
        dout(random_array(4, {1, s.q_heads, s.q_len, s.v_dim}, dtype)) {}

  DType dtype;
  Array q, k, v, dout;
};

struct Answer {
  Array out, lse, dq, dk, dv;
};

// A causal band that keeps some keys for every query, and a second one further back: two tiles for most rows.
std::vector<Tile> tiles_of(const Pick& q, const Pick& kv, int64_t shift) {
  Tile near{.q_rows = q.count,
            .q_pos0 = q.first,
            .q_stride = q.stride,
            .kv_rows = kv.count,
            .kv_pos0 = kv.first,
            .kv_stride = kv.stride,
            .lo = shift - 300,
            .hi = shift};
  Tile far = near;
  far.lo = shift - 900;
  far.hi = shift - 301;
  return {near, far};
}

// Forward and backward of the rows that are picked; lse and delta come from `whole` where it is given.
Answer run(const Kernels& kernels, const Values& values, const Pick& q_rows, const Pick& kv_rows,
           const Answer* whole = nullptr) {
  const DType wide = accumulator_of(values.dtype);
  const Tensor q(picked(values.q, q_rows), values.dtype), k(picked(values.k, kv_rows), values.dtype);
  const Tensor v(picked(values.v, kv_rows), values.dtype), dout(picked(values.dout, q_rows), values.dtype);
  const std::array<int64_t, 4> stats{1, values.q.size[1], q_rows.count, 1};
  Tensor out(wide, {1, stats[1], stats[2], values.v.size[3]}), max(wide, stats), sum(wide, stats), lse(wide, stats);
  const std::vector<Tile> tiles = tiles_of(q_rows, kv_rows, values.k.size[2] - values.q.size[2]);
  Workspace workspace;
  // Not finished: the state in full precision, which shows more bits than a rounded output.
  ForwardArgs forward;
  forward.q = q.view();
  forward.k = k.view();
  forward.v = v.view();
  forward.tiles = tiles;
  forward.scale = 0.3;
  forward.state = {max.view(), sum.view(), out.view()};
  forward.finish = false;
  forward.fixed_order = true;
  kernels.forward(forward, workspace, Serial());
  Answer answer{out.array(), sum.array(), {}, {}, {}};
  const Array highest = max.array();
  for (std::size_t i = 0; i < highest.data.size(); ++i) {
    answer.lse.data[i] = highest.data[i] + std::log(answer.lse.data[i]);
  }
  const Tensor row_lse(whole ? picked(whole->lse, q_rows) : answer.lse, wide), delta(Array(stats, 0.25), wide);
  Tensor dq(wide, picked(values.q, q_rows).size), dk(wide, picked(values.k, kv_rows).size),
      dv(wide, picked(values.v, kv_rows).size);
  BackwardArgs args;
  args.q = q.view();
  args.k = k.view();
  args.v = v.view();
  args.dout = dout.view();
  args.lse = row_lse.view();
  args.delta = delta.view();
  args.tiles = tiles;
  args.scale = 0.3;
  args.dq = dq.view();
  args.dk = dk.view();
  args.dv = dv.view();
  args.fixed_order = true;
  kernels.backward(args, workspace, Serial());
  answer.dq = dq.array();
  answer.dk = dk.array();
  answer.dv = dv.array();
  return answer;
}

class FixedOrderTest : public ::testing::TestWithParam<Target> {
 protected:
  std::vector<DType> dtypes() const {
    if (GetParam().is_slow) return {DType::kBF16};
    return {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  }
};

TEST_P(FixedOrderTest, QueryRowsKeepTheirBitsWhateverOthersAreThere) {
  const Sizes sizes;
  const Pick all_q{0, 1, sizes.q_len}, all_kv{0, 1, sizes.kv_len};
  for (const DType dtype : dtypes()) {
    const Values values(dtype, sizes);
    const Answer whole = run(GetParam().kernels, values, all_q, all_kv);
    for (const Pick& pick : {Pick{0, 1, 1}, Pick{209, 1, 1}, Pick{7, 1, 101}, Pick{1, 3, 70}, Pick{5, 41, 5}}) {
      SCOPED_TRACE(concat(name_of(dtype), ", rows from ", pick.first, " by ", pick.stride));
      const Answer part = run(GetParam().kernels, values, pick, all_kv, &whole);
      EXPECT_TRUE(same_bits(part.out, picked(whole.out, pick)));
      EXPECT_TRUE(same_bits(part.lse, picked(whole.lse, pick)));
      EXPECT_TRUE(same_bits(part.dq, picked(whole.dq, pick)));
    }
  }
}

TEST_P(FixedOrderTest, KeyRowsKeepTheirBitsWhateverOthersAreThere) {
  const Sizes sizes;
  const Pick all_q{0, 1, sizes.q_len}, all_kv{0, 1, sizes.kv_len};
  for (const DType dtype : dtypes()) {
    const Values values(dtype, sizes);
    const Answer whole = run(GetParam().kernels, values, all_q, all_kv);
    for (const Pick& pick : {Pick{1499, 1, 1}, Pick{700, 1, 333}, Pick{2, 4, 374}, Pick{5, 97, 15}}) {
      SCOPED_TRACE(concat(name_of(dtype), ", rows from ", pick.first, " by ", pick.stride));
      const Answer part = run(GetParam().kernels, values, all_q, pick, &whole);
      EXPECT_TRUE(same_bits(part.dk, picked(whole.dk, pick)));
      EXPECT_TRUE(same_bits(part.dv, picked(whole.dv, pick)));
    }
  }
}

// Many heads of large dims on one key head: what a wave holds would depend on the number of keys.
TEST_P(FixedOrderTest, WavesOfManyHeadsAreCutTheSame) {
  if (GetParam().is_slow || kIsSanitized) GTEST_SKIP() << "too slow emulated, or under a sanitizer";
  const Sizes sizes{.q_heads = 12, .kv_heads = 1, .q_len = 300, .kv_len = 720, .qk_dim = 768, .v_dim = 768};
  const Values values(DType::kF32, sizes);
  const Pick all_q{0, 1, sizes.q_len}, pick{600, 1, 20};
  const Answer whole = run(GetParam().kernels, values, all_q, {0, 1, sizes.kv_len});
  const Answer part = run(GetParam().kernels, values, all_q, pick, &whole);
  EXPECT_TRUE(same_bits(part.dk, picked(whole.dk, pick)));
  EXPECT_TRUE(same_bits(part.dv, picked(whole.dv, pick)));
}

INSTANTIATE_TEST_SUITE_P(Targets, FixedOrderTest, ::testing::ValuesIn(all_targets()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace ringspan::test
