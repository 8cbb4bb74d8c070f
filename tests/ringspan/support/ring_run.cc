#include "tests/ringspan/support/ring_run.h"

#include <limits>

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
  Tensor bias, dbias, mask, sink, dsink, slopes;
  std::vector<PairGrid> grids;
};

// A view of the full size over a tensor that shares axes.
template <class View>
View shared(View view, const std::array<int64_t, 4>& full) {
  for (int axis = 0; axis < 4; ++axis) {
    if (view.size[axis] == 1) view.stride[axis] = 0;
  }
  view.size = full;
  return view;
}

// What changes single pairs of a rank, over the tensors in `t`.
void add_pairs(const Plan& plan, const RingInputs& in, int64_t rank, LocalTensors& t) {
  const Problem& p = plan.problem();
  const DType wide = accumulator_of(p.dtype);
  if (in.bias.is_given()) {
    const double padding = std::numeric_limits<double>::quiet_NaN();
    const Array local = is_by_row(in, in.bias, p) ? shard_of(in.bias, plan.q_map(), rank, padding) : in.bias;
    t.bias = Tensor(local, in.bias_dtype.value_or(p.dtype), in.pair_order, in.pair_gap);
    t.dbias = Tensor(wide, local.size, in.pair_order, in.pair_gap);
  }
  if (in.mask.is_given()) {
    const bool is_split = is_by_row(in, in.mask, p) && !in.mask_by_grid;
    Array local = is_split ? shard_of(in.mask, plan.q_map(), rank, 0) : in.mask;
    for (double& keeps : local.data) keeps = (keeps != 0) != in.mask_marks_masked;
    t.mask = Tensor(local, DType::kByte, in.pair_order, in.pair_gap);
  }
  if (in.slopes.is_given()) t.slopes = Tensor(in.slopes, wide);
  if (in.sink.empty()) return;
  t.sink = Tensor(array_of({1, p.q_heads, 1, 1}, in.sink), wide);
  t.dsink = Tensor(wide, {1, p.q_heads, 1, 1});
}

Extras extras_of(const Problem& p, const RingInputs& in, int64_t q_rows, LocalTensors& t) {
  Extras extras;
  PairInputs& pairs = extras.pairs;
  const std::array<int64_t, 4> full{p.batch, p.q_heads, q_rows, p.kv_len};
  if (in.bias.is_given()) pairs.bias = shared(std::as_const(t.bias).view(), full);
  pairs.bias_factor = in.bias_factor;
  if (in.mask.is_given()) {
    const TensorView bytes =
        shared(t.mask.view(), {p.batch, p.q_heads, in.mask_by_grid ? in.mask.size[2] : q_rows, p.kv_len});
    pairs.mask = {bytes.data, bytes.size, bytes.stride, in.mask_marks_masked, in.mask_by_grid};
  }
  if (in.slopes.is_given()) pairs.slopes = shared(std::as_const(t.slopes).view(), {p.batch, p.q_heads, 1, 1});
  pairs.slope_shift = in.slope_shift;
  pairs.slope_of_root = in.slope_of_root;
  if (!in.sink.empty()) extras.sink = std::as_const(t.sink).view();
  pairs.numbers.softcap = in.softcap;
  pairs.dropout = in.dropout;
  t.grids = in.grids.empty() ? std::vector{grid_at(in, p, 0)} : in.grids;
  pairs.grids = t.grids;
  return extras;
}

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
  t.dout = in.dout_is_one_value ? Tensor(Array({1, 1, 1, 1}, in.dout.data.empty() ? 0 : in.dout.data[0]), p.dtype)
                                : input(in.dout, plan.q_map(), p.dtype);
  if (in.dlse.is_given()) t.dlse = input(in.dlse, plan.q_map(), stats);
  t.out = output(p.q_heads, q_rows, p.v_dim, p.dtype);
  t.max = output(p.q_heads, q_rows, 1, stats);
  t.sum = output(p.q_heads, q_rows, 1, stats);
  t.lse = output(p.q_heads, q_rows, 1, stats);
  t.dq = output(p.q_heads, q_rows, p.qk_dim, p.dtype);
  t.dk = output(p.kv_heads, kv_rows, p.qk_dim, p.dtype);
  t.dv = output(p.kv_heads, kv_rows, p.v_dim, p.dtype);
  return t;
}

// Gradients of what ranks share are parts; those of rows are in the place of the row.
void add_shared_gradients(const Plan& plan, const RingInputs& in, int64_t rank, const LocalTensors& t,
                          RingResults& results) {
  for (std::size_t n = 0; n < in.sink.size(); ++n) {
    results.dsink[n] += t.dsink.array().at(0, static_cast<int64_t>(n), 0);
  }
  if (!in.bias.is_given()) return;
  if (is_by_row(in, in.bias, plan.problem())) {
    put_back(t.dbias.array(), plan.q_map(), rank, results.dbias);
    return;
  }
  const Array part = t.dbias.array();
  for (std::size_t i = 0; i < part.data.size(); ++i) results.dbias.data[i] += part.data[i];
}

// Fills `t` and runs forward and backward of the transport's rank.
void run_both(const Plan& plan, const RingInputs& in, const RingOptions& options, Transport& transport, LocalTensors& t,
              Transport::Counters& after_forward) {
  const Problem& p = plan.problem();
  const int64_t rank = transport.rank();
  t = local_tensors(plan, in, rank, options.padding);
  const RankPlan part = plan.rank(rank);
  const ThreadPool pool(options.threads);
  const OutputView output{t.out.view(), t.max.view(), t.sum.view(), t.lse.view()};
  const InputsView inputs{t.q.view(), t.k.view(), t.v.view()};
  const ConstTensorView dout = in.dout_is_one_value ? shared(t.dout.view(), t.out.view().size) : t.dout.view();
  const ConstTensorView dlse = in.dlse.is_given() ? t.dlse.view() : ConstTensorView{};
  if (options.before_forward) options.before_forward(rank);
  add_pairs(plan, in, rank, t);
  const std::array<int64_t, 4> full{p.batch, p.q_heads, plan.q_map().local_rows(rank), p.kv_len};
  const Extras extras = extras_of(p, in, full[2], t);
  ring_forward(part, transport, inputs, output, {&pool, extras});
  after_forward = transport.counters();
  const GradsView grads{t.dq.view(), t.dk.view(), t.dv.view(), in.sink.empty() ? TensorView{} : t.dsink.view(),
                        in.bias.is_given() && in.wants_dbias ? shared(t.dbias.view(), full) : TensorView{}};
  ring_backward(part, transport, {inputs, output, dout, dlse}, grads, {&pool, extras});
}

}  // namespace

bool is_by_row(const RingInputs& in, const Array& tensor, const Problem& p) {
  return tensor.size[2] == p.q_len && (p.q_len != 1 || in.splits_one_row);
}

PairGrid grid_at(const RingInputs& in, const Problem& p, int64_t q_pos) {
  PairGrid grid{};
  grid.row_stride = static_cast<uint64_t>(p.kv_len);
  grid.head_stride = static_cast<uint64_t>(p.q_len * p.kv_len);
  grid.batch_stride = static_cast<uint64_t>(p.q_heads) * grid.head_stride;
  for (const PairGrid& one : in.grids) {
    if (one.q_begin <= q_pos) grid = one;
  }
  return grid;
}

void describe_row_tensors(const RingInputs& in, Problem& p) {
  if (in.bias.is_given() && is_by_row(in, in.bias, p)) {
    p.bias = {in.bias.size[0], in.bias.size[1], size_of(in.bias_dtype.value_or(p.dtype)), in.wants_dbias};
  }
  if (in.mask.is_given() && is_by_row(in, in.mask, p) && !in.mask_by_grid) {
    p.mask = {in.mask.size[0], in.mask.size[1], 1, false};
  }
}

RingInputs random_inputs(uint64_t seed, const Problem& p) {
  RingInputs in;
  in.q = random_array(seed, {p.batch, p.q_heads, p.q_len, p.qk_dim}, p.dtype);
  in.k = random_array(seed + 1, {p.batch, p.kv_heads, p.kv_len, p.qk_dim}, p.dtype);
  in.v = random_array(seed + 2, {p.batch, p.kv_heads, p.kv_len, p.v_dim}, p.dtype);
  in.dout = random_array(seed + 3, {p.batch, p.q_heads, p.q_len, p.v_dim}, p.dtype);
  return in;
}

RankResults run_rank(const Plan& plan, const RingInputs& in, Transport& transport, const RingOptions& options) {
  LocalTensors t;
  Transport::Counters after_forward;
  run_both(plan, in, options, transport, t, after_forward);
  return {t.out, t.max, t.sum, t.lse, t.dq, t.dk, t.dv};
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
    run_both(plan, in, options, transport, t, results.forward[rank]);
    results.total[rank] = transport.counters();
  });
  results.out = Array({p.batch, p.q_heads, p.q_len, p.v_dim});
  results.max = results.sum = results.lse = Array({p.batch, p.q_heads, p.q_len, 1});
  results.dq = Array({p.batch, p.q_heads, p.q_len, p.qk_dim});
  results.dk = Array({p.batch, p.kv_heads, p.kv_len, p.qk_dim});
  results.dv = Array({p.batch, p.kv_heads, p.kv_len, p.v_dim});
  results.dbias = Array(in.bias.size);
  results.dsink.assign(in.sink.size(), 0);
  for (int64_t rank = 0; rank < world; ++rank) {
    const LocalTensors& t = tensors[rank];
    add_shared_gradients(plan, in, rank, t, results);
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
