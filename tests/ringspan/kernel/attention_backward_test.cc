// The contracts of backward that no accuracy test sees: what is overwritten, what is added to, and when.
#include <array>
#include <cmath>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"
#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/attention_case.h"
#include "tests/ringspan/support/sanitized.h"

namespace ringspan::test {
namespace {

class AttentionBackwardTest : public ::testing::TestWithParam<Target> {
 protected:
  Kernels kernels() const { return GetParam().kernels; }
};

// One case's tensors, owned, and the arguments that point at them.
struct BackwardCall {
  explicit BackwardCall(const AttentionCase& c, const Array& dq0, const Array& dk0, const Array& dv0)
      : dtype(c.spec.dtype),
        wide(accumulator_of(dtype)),
        q(c.inputs.q, dtype),
        k(c.inputs.k, dtype),
        v(c.inputs.v, dtype),
        dout(c.dout, dtype),
        lse(rounded(c.want.lse, wide), wide),
        delta(rounded(c.want_grads.delta, wide), wide),
        dq(dq0, wide),
        dk(dk0, wide),
        dv(dv0, wide) {
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.dout = dout.view();
    args.lse = lse.view();
    args.delta = delta.view();
    args.tiles = c.tiles;
    args.scale = c.inputs.scale;
    args.dq = dq.view();
    args.dk = dk.view();
    args.dv = dv.view();
  }

  DType dtype, wide;
  Tensor q, k, v, dout, lse, delta, dq, dk, dv;
  BackwardArgs args;
};

Array sum_of(const Array& a, const Array& b) {
  Array sum = a;
  for (std::size_t i = 0; i < sum.data.size(); ++i) sum.data[i] += b.data[i];
  return sum;
}

TEST_P(AttentionBackwardTest, AddsOnlyWhereAsked) {
  const auto c = make_case({.batch = 2,
                            .q_heads = 4,
                            .kv_heads = 2,
                            .q_len = 50,
                            .kv_len = 80,
                            .qk_dim = 24,
                            .v_dim = 8,
                            .mask = MaskKind::kPartial});
  const Array dq0 = random_array(90, c->inputs.q.size, DType::kF32),
              dk0 = random_array(91, c->inputs.k.size, DType::kF32),
              dv0 = random_array(92, c->inputs.v.size, DType::kF32);
  for (const bool dq_begin : {false, true}) {
    for (const bool dkv_begin : {false, true}) {
      BackwardCall call(*c, dq0, dk0, dv0);
      call.args.dq_begin = dq_begin;
      call.args.dkv_begin = dkv_begin;
      Workspace workspace;
      kernels().backward(call.args, workspace, Serial());
      const Gradients& want = c->want_grads;
      EXPECT_LE(max_error(call.dq.array(), dq_begin ? want.dq : sum_of(want.dq, dq0)), 5e-5);
      EXPECT_LE(max_error(call.dk.array(), dkv_begin ? want.dk : sum_of(want.dk, dk0)), 5e-5);
      EXPECT_LE(max_error(call.dv.array(), dkv_begin ? want.dv : sum_of(want.dv, dv0)), 5e-5);
    }
  }
}

// What is not wanted is neither read nor written, and what is wanted keeps its bits.
TEST_P(AttentionBackwardTest, OneSideAloneHasTheSameBits) {
  const auto c = make_case({.batch = 2,
                            .q_heads = 4,
                            .kv_heads = 2,
                            .q_len = 150,
                            .kv_len = 280,
                            .qk_dim = 24,
                            .v_dim = 8,
                            .mask = MaskKind::kCausal});
  const ThreadPool pool(2);
  const Array nothing(c->inputs.k.size, 777);
  const BackwardResult both = run_backward(*c, kernels());
  for (const bool wants_dq : {true, false}) {
    BackwardCall call(*c, Array(c->inputs.q.size, 777), nothing, Array(c->inputs.v.size, 777));
    call.args.wants_dq = wants_dq;
    call.args.wants_dkv = !wants_dq;
    int num_calls = 0;
    call.args.before_accumulate = [&] { ++num_calls; };
    (wants_dq ? call.args.dk : call.args.dq) = {};
    if (wants_dq) call.args.dv = {};
    Workspace workspace;
    kernels().backward(call.args, workspace, pool);
    EXPECT_EQ(num_calls, 1);
    EXPECT_EQ(call.dq.array().data, wants_dq ? both.dq.data : Array(c->inputs.q.size, 777).data);
    EXPECT_EQ(call.dk.array().data, wants_dq ? nothing.data : both.dk.data);
    EXPECT_EQ(call.dv.array().data, wants_dq ? Array(c->inputs.v.size, 777).data : both.dv.data);
  }
}

// The other parts of dk and dv arrive only when before_accumulate() is called: until then there is NaN.
TEST_P(AttentionBackwardTest, WaitsForTheOtherPartsOfDkAndDv) {
  const ThreadPool pool(3);
  for (const bool with_tiles : {true, false}) {
    const auto c = make_case({.q_heads = 2, .kv_heads = 1, .q_len = 300, .kv_len = 280, .mask = MaskKind::kCausal});
    const Array nothing(c->inputs.k.size, NAN), arrived = random_array(91, c->inputs.k.size, DType::kF32);
    BackwardCall call(*c, Array(c->inputs.q.size), nothing, nothing);
    if (!with_tiles) call.args.tiles = {};
    call.args.dkv_begin = false;
    int num_calls = 0;
    const std::thread::id caller = std::this_thread::get_id();
    call.args.before_accumulate = [&] {
      ++num_calls;
      EXPECT_EQ(std::this_thread::get_id(), caller);
      copy(Tensor(arrived, DType::kF32).view(), call.dk.view());
      copy(Tensor(arrived, DType::kF32).view(), call.dv.view());
    };
    Workspace workspace;
    kernels().backward(call.args, workspace, pool);
    EXPECT_EQ(num_calls, 1);
    EXPECT_LE(max_error(call.dk.array(), with_tiles ? sum_of(c->want_grads.dk, arrived) : arrived), 5e-5);
    EXPECT_LE(max_error(call.dv.array(), with_tiles ? sum_of(c->want_grads.dv, arrived) : arrived), 5e-5);
  }
}

// The gradients that come out where random ones were before: added to, or written over. Any lse and delta will do.
BackwardResult run_over(const Kernels& kernels, const std::array<int64_t, 4>& q_size,
                        const std::array<int64_t, 4>& kv_size, bool begin, bool is_announced,
                        const Parallel& parallel) {
  const Tensor q(random_array(1, q_size, DType::kF32), DType::kF32),
      k(random_array(2, kv_size, DType::kF32), DType::kF32), v(random_array(3, kv_size, DType::kF32), DType::kF32),
      dout(random_array(4, q_size, DType::kF32), DType::kF32);
  const std::array<int64_t, 4> stats{q_size[0], q_size[1], q_size[2], 1};
  const Tensor lse(Array(stats, 5), DType::kF32), delta(Array(stats, 0.25), DType::kF32);
  Tensor dq(random_array(5, q_size, DType::kF32), DType::kF32), dk(random_array(6, kv_size, DType::kF32), DType::kF32),
      dv(random_array(7, kv_size, DType::kF32), DType::kF32);
  // The last third of the queries meets nothing, and few keys are met.
  const std::vector<Tile> tiles{
      {.q_row0 = 3, .q_rows = q_size[2] * 2 / 3, .kv_rows = kv_size[2], .lo = -150, .hi = 20}};
  BackwardArgs args{.q = q.view(),
                    .k = k.view(),
                    .v = v.view(),
                    .dout = dout.view(),
                    .lse = lse.view(),
                    .delta = delta.view(),
                    .tiles = tiles,
                    .scale = 0.1,
                    .dq = dq.view(),
                    .dk = dk.view(),
                    .dv = dv.view(),
                    .dq_begin = begin,
                    .dkv_begin = begin,
                    .before_accumulate = {}};
  if (is_announced) args.before_accumulate = [] {};
  Workspace workspace;
  kernels.backward(args, workspace, parallel);
  return {dq.array(), dk.array(), dv.array()};
}

// Where nobody waits to be told, gradients are written as soon as they are complete. In the second case heads, queries
// and keys are cut into several waves, which add to what the waves before have written.
TEST_P(AttentionBackwardTest, WritingAtOnceChangesNoBit) {
  const ThreadPool pool(3);
  const Serial serial;
  const std::vector<std::pair<std::array<int64_t, 4>, std::array<int64_t, 4>>> sizes{
      {{2, 4, 700, 24}, {2, 2, 900, 24}}, {{1, 12, 300, 768}, {1, 1, 720, 768}}};
  for (const auto& [q_size, kv_size] : sizes) {
    const bool is_large = q_size[3] > 100;
    if (is_large && (GetParam().is_slow || kIsSanitized)) continue;
    for (const bool begin : {true, false}) {
      if (is_large && begin) continue;
      const BackwardResult want = run_over(kernels(), q_size, kv_size, begin, /*is_announced=*/true, Serial());
      for (const bool is_announced : {true, false}) {
        for (const Parallel* parallel : {static_cast<const Parallel*>(&pool), static_cast<const Parallel*>(&serial)}) {
          const BackwardResult got = run_over(kernels(), q_size, kv_size, begin, is_announced, *parallel);
          SCOPED_TRACE(concat(q_size[3], " dims, begin ", begin, ", announced ", is_announced));
          expect_same(got, want);
        }
      }
    }
  }
}

// forward, row_delta and backward of the library chained, with a gradient that comes in through lse.
TEST_P(AttentionBackwardTest, ChainMatchesTheOracle) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const auto c = make_case({.dtype = dtype,
                              .batch = 2,
                              .q_heads = 4,
                              .kv_heads = 2,
                              .q_len = 90,
                              .kv_len = 120,
                              .qk_dim = 24,
                              .v_dim = 16,
                              .mask = MaskKind::kBottomRight,
                              .scale = 0.31});
    const ForwardResult forward = run_forward(*c, kernels());
    const Tensor out(forward.out, dtype), dlse(c->dlse, dtype);
    BackwardCall call(*c, c->inputs.q, c->inputs.k, c->inputs.v);
    call.lse = Tensor(forward.lse, dtype);
    call.delta = Tensor(dtype, forward.lse.size);
    row_delta(out.view(), call.dout.view(), dlse.view(), call.delta.view(), Serial());
    call.args.lse = call.lse.view();
    call.args.delta = call.delta.view();
    Workspace workspace;
    kernels().backward(call.args, workspace, Serial());
    expect_accurate(*c, BackwardResult{call.dq.array(), call.dk.array(), call.dv.array()});
  }
}

// What `out.sum().backward()` and expanded KV heads hand over: strides of 0.
TEST_P(AttentionBackwardTest, ExpandedInputsChangeNoBit) {
  const int64_t heads = 4, q_len = 60, kv_len = 70, dim = 16;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    AttentionCase c({.dtype = dtype,
                     .q_heads = heads,
                     .kv_heads = heads,
                     .q_len = q_len,
                     .kv_len = kv_len,
                     .qk_dim = dim,
                     .v_dim = dim,
                     .mask = MaskKind::kCausal});
    const Tensor one_k(random_array(1, {1, 1, kv_len, dim}, dtype), dtype);
    for_each_index(c.inputs.k.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
      c.inputs.k.at(b, n, s, d) = one_k.array().data[static_cast<std::size_t>(s * dim + d)];
    });
    for (double& value : c.dout.data) value = 0.5;
    const BackwardResult want = run_backward(c, kernels());
    const ForwardResult want_forward = run_forward(c, kernels());

    BackwardCall call(c, c.inputs.q, c.inputs.k, c.inputs.v);
    ConstTensorView k = one_k.view();
    k.size[1] = heads;
    k.stride[1] = 0;
    const Tensor scalar(Array({1, 1, 1, 1}, 0.5), dtype);
    ConstTensorView dout = scalar.view();
    dout.size = c.dout.size;
    dout.stride = {0, 0, 0, 0};
    call.args.k = k;
    call.args.dout = dout;
    Workspace workspace;
    kernels().backward(call.args, workspace, Serial());
    expect_same(BackwardResult{call.dq.array(), call.dk.array(), call.dv.array()}, want);

    Tensor out(dtype, c.want.out.size), max(DType::kF32, c.want.lse.size), sum(DType::kF32, c.want.lse.size),
        lse(DType::kF32, c.want.lse.size);
    ForwardArgs args{.q = call.q.view(),
                     .k = k,
                     .v = call.v.view(),
                     .tiles = c.tiles,
                     .scale = c.inputs.scale,
                     .state = {},
                     .output = {out.view(), max.view(), sum.view(), lse.view()}};
    kernels().forward(args, workspace, Serial());
    expect_same(ForwardResult{out.array(), max.array(), sum.array(), lse.array()}, want_forward);
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionBackwardTest, ::testing::ValuesIn(all_targets()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace ringspan::test
