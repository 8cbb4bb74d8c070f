#include "tests/ringspan/support/ring_run.h"

#include "ringspan/ring/ring_attention.h"

#include "tests/ringspan/support/tensor.h"

namespace ringspan::test {
namespace {

// The rows of `global` that a rank holds; padding rows hold `padding`.
Array shard_of(const Array& global, const ShardMap& map, int64_t rank, double padding) {
  Array local({global.size[0], global.size[1], map.local_rows(rank), global.size[3]}, padding);
  for (int64_t b = 0; b < local.size[0]; ++b) {
    const std::vector<int64_t> positions = map.positions(rank, b);
    for (int64_t n = 0; n < local.size[1]; ++n) {
      for (int64_t s = 0; s < local.size[2]; ++s) {
        if (positions[s] < 0) continue;
        for (int64_t d = 0; d < local.size[3]; ++d) local.at(b, n, s, d) = global.at(b, n, positions[s], d);
      }
    }
  }
  return local;
}

void put_back(const Array& local, const ShardMap& map, int64_t rank, Array& global) {
  for (int64_t b = 0; b < local.size[0]; ++b) {
    const std::vector<int64_t> positions = map.positions(rank, b);
    for (int64_t n = 0; n < local.size[1]; ++n) {
      for (int64_t s = 0; s < local.size[2]; ++s) {
        if (positions[s] < 0) continue;
        for (int64_t d = 0; d < local.size[3]; ++d) global.at(b, n, positions[s], d) = local.at(b, n, s, d);
      }
    }
  }
}

struct LocalTensors {
  Tensor q, k, v, dout, dlse, out, max, sum, lse, dq, dk, dv;
};

// Outputs start as rubbish, so that what a call forgets to write is seen.
LocalTensors local_tensors(const Plan& plan, const RingInputs& in, int64_t rank, double padding) {
  const Problem& p = plan.problem();
  const DType stats = accumulator_of(p.dtype);
  const auto input = [&](const Array& global, const ShardMap& map, DType dtype) {
    return Tensor(shard_of(global, map, rank, padding), dtype, order_of(p.layout));
  };
  const auto output = [&](int64_t heads, int64_t rows, int64_t dim, DType dtype) {
    return Tensor(Array({p.batch, heads, rows, dim}, 777), dtype, order_of(p.layout));
  };
  const int64_t q_rows = plan.q_map().local_rows(rank), kv_rows = plan.kv_map().local_rows(rank);
  LocalTensors t;
  t.q = input(in.q, plan.q_map(), p.dtype);
  t.k = input(in.k, plan.kv_map(), p.dtype);
  t.v = input(in.v, plan.kv_map(), p.dtype);
  t.dout = input(in.dout, plan.q_map(), p.dtype);
  if (!in.dlse.data.empty()) t.dlse = input(in.dlse, plan.q_map(), stats);
  t.out = output(p.q_heads, q_rows, p.v_dim, p.dtype);
  t.max = output(p.q_heads, q_rows, 1, stats);
  t.sum = output(p.q_heads, q_rows, 1, stats);
  t.lse = output(p.q_heads, q_rows, 1, stats);
  t.dq = output(p.q_heads, q_rows, p.qk_dim, p.dtype);
  t.dk = output(p.kv_heads, kv_rows, p.qk_dim, p.dtype);
  t.dv = output(p.kv_heads, kv_rows, p.v_dim, p.dtype);
  return t;
}

}  // namespace

RingInputs random_inputs(uint64_t seed, const Problem& p) {
  RingInputs in;
  in.q = random_array(seed, {p.batch, p.q_heads, p.q_len, p.qk_dim}, p.dtype);
  in.k = random_array(seed + 1, {p.batch, p.kv_heads, p.kv_len, p.qk_dim}, p.dtype);
  in.v = random_array(seed + 2, {p.batch, p.kv_heads, p.kv_len, p.v_dim}, p.dtype);
  in.dout = random_array(seed + 3, {p.batch, p.q_heads, p.q_len, p.v_dim}, p.dtype);
  return in;
}

RingResults run_ring(const Plan& plan, const RingInputs& in, const RingOptions& options) {
  const Problem& p = plan.problem();
  const int64_t world = plan.world();
  RingResults results;
  results.local_out.resize(world);
  results.local_dq.resize(world);
  results.local_dk.resize(world);
  results.forward.resize(world);
  results.total.resize(world);
  std::vector<LocalTensors> tensors(world);
  inproc::run_ranks(world, [&](Transport& transport) {
    const int64_t rank = transport.rank();
    LocalTensors& t = tensors[rank];
    t = local_tensors(plan, in, rank, options.padding);
    const RankPlan part = plan.rank(rank);
    const ThreadPool pool(options.threads);
    const OutputView output{t.out.view(), t.max.view(), t.sum.view(), t.lse.view()};
    const ConstTensorView q = t.q.view(), k = t.k.view(), v = t.v.view(), dout = t.dout.view();
    const ConstTensorView dlse = in.dlse.data.empty() ? ConstTensorView{} : t.dlse.view();
    if (options.before_forward) options.before_forward(rank);
    ring_forward(part, transport, q, k, v, output, pool);
    results.forward[rank] = transport.counters();
    ring_backward(part, transport, q, k, v, output, dout, dlse, {t.dq.view(), t.dk.view(), t.dv.view()}, pool);
    results.total[rank] = transport.counters();
  });
  results.out = Array({p.batch, p.q_heads, p.q_len, p.v_dim});
  results.max = results.sum = results.lse = Array({p.batch, p.q_heads, p.q_len, 1});
  results.dq = Array({p.batch, p.q_heads, p.q_len, p.qk_dim});
  results.dk = Array({p.batch, p.kv_heads, p.kv_len, p.qk_dim});
  results.dv = Array({p.batch, p.kv_heads, p.kv_len, p.v_dim});
  for (int64_t rank = 0; rank < world; ++rank) {
    const LocalTensors& t = tensors[rank];
    results.local_out[rank] = t.out.array();
    results.local_dq[rank] = t.dq.array();
    results.local_dk[rank] = t.dk.array();
    put_back(t.out.array(), plan.q_map(), rank, results.out);
    put_back(t.max.array(), plan.q_map(), rank, results.max);
    put_back(t.sum.array(), plan.q_map(), rank, results.sum);
    put_back(t.lse.array(), plan.q_map(), rank, results.lse);
    put_back(t.dq.array(), plan.q_map(), rank, results.dq);
    put_back(t.dk.array(), plan.kv_map(), rank, results.dk);
    put_back(t.dv.array(), plan.kv_map(), rank, results.dv);
  }
  return results;
}

}  // namespace ringspan::test
