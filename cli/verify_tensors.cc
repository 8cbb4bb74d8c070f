#include "cli/verify_tensors.h"

#include <cmath>
#include <functional>
#include <random>
#include <span>

namespace ringspan::cli {
namespace {

using Generator = std::mt19937_64;

// A row without a kept pair is rare and happens.
constexpr double kKeptByMask = 0.7;

Dense normal_tensor(Generator& generator, DType dtype, Layout layout, std::array<int64_t, 4> size) {
  Dense dense(dtype, layout, size);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < dense.view().num_elements(); ++i) {
    store_from_double(dense.view().data, dtype, i, normal(generator));
  }
  return dense;
}

Dense as_double(const Dense& from, Layout layout) {
  if (!from.is_given()) return {};
  Dense to(DType::kF64, layout, from.view().size);
  copy(from.view(), to.view());
  return to;
}

Dense copied(const Dense& from) {
  if (!from.is_given()) return {};
  Dense to(from.view().dtype, Layout::kBNSD, from.view().size);
  copy(from.view(), to.view());
  return to;
}

TensorView one_row(const TensorView& view, int64_t b, int64_t s) {
  return {view.row(b, 0, s), view.dtype, {1, view.heads(), 1, view.dim()}, view.stride};
}

// Calls action(row of `global`, row of `local`) for each position that the rank holds.
template <class Action>
void for_each_shared_row(const Dense& global, const Dense& local, const ShardMap& map, int64_t rank, Action&& action) {
  for (int64_t b = 0; b < global.view().batch(); ++b) {
    const std::vector<int64_t> positions = map.positions(rank, b);
    for (size_t row = 0; row < positions.size(); ++row) {
      if (positions[row] < 0) continue;
      action(one_row(global.view(), b, positions[row]), one_row(local.view(), b, static_cast<int64_t>(row)));
    }
  }
}

Dense shard_of(const Dense& global, Layout layout, const ShardMap& map, int64_t rank) {
  if (!global.is_given()) return {};
  std::array<int64_t, 4> size = global.view().size;
  size[2] = map.local_rows(rank);
  Dense local(global.view().dtype, layout, size);
  for_each_shared_row(global, local, map, rank,
                      [](const TensorView& there, const TensorView& here) { copy(there, here); });
  return local;
}

void put_rows(const Dense& local, const ShardMap& map, int64_t rank, const Dense& global) {
  if (!global.is_given()) return;
  for_each_shared_row(global, local, map, rank,
                      [](const TensorView& there, const TensorView& here) { copy(here, there); });
}

// A view of the full size over a tensor that shares axes; of what is not given none.
template <class View>
View expanded(View view, const std::array<int64_t, 4>& size) {
  if (!view.is_given()) return view;
  for (int axis = 0; axis < 4; ++axis) {
    if (view.size[axis] == 1) view.stride[axis] = 0;
  }
  view.size = size;
  return view;
}

}  // namespace

Problem with_terms(Problem problem, const Terms& terms) {
  if (terms.bias == Terms::Bias::kRows) {
    problem.bias = {problem.batch, problem.q_heads, size_of(problem.dtype), true};
  }
  if (terms.mask) problem.mask = {problem.batch, 1, 1, false};
  return problem;
}

Dense::Dense(DType dtype, Layout layout, std::array<int64_t, 4> size)
    : bytes_(static_cast<size_t>(size[0] * size[1] * size[2] * size[3] * size_of(dtype))),
      view_(view_of(static_cast<void*>(bytes_.data()), dtype, layout, size)) {}

Inputs random_inputs(const Problem& p, const Terms& terms, uint64_t seed) {
  Generator generator(seed);
  const DType stats = accumulator_of(p.dtype);
  Inputs in;
  in.q = normal_tensor(generator, p.dtype, p.layout, {p.batch, p.q_heads, p.q_len, p.qk_dim});
  in.k = normal_tensor(generator, p.dtype, p.layout, {p.batch, p.kv_heads, p.kv_len, p.qk_dim});
  in.v = normal_tensor(generator, p.dtype, p.layout, {p.batch, p.kv_heads, p.kv_len, p.v_dim});
  in.dout = normal_tensor(generator, p.dtype, p.layout, {p.batch, p.q_heads, p.q_len, p.v_dim});
  if (terms.lse_gradient) in.dlse = normal_tensor(generator, stats, p.layout, {p.batch, p.q_heads, p.q_len, 1});
  if (terms.bias == Terms::Bias::kRows) {
    in.bias = normal_tensor(generator, p.dtype, Layout::kBNSD, {p.batch, p.q_heads, p.q_len, p.kv_len});
  } else if (terms.bias == Terms::Bias::kShared) {
    in.bias = normal_tensor(generator, p.dtype, Layout::kBNSD, {1, p.q_heads, 1, p.kv_len});
  }
  if (terms.mask) {
    in.mask = Dense(DType::kByte, Layout::kBNSD, {p.batch, 1, p.q_len, p.kv_len});
    std::bernoulli_distribution keeps(kKeptByMask);
    for (int64_t i = 0; i < in.mask.view().num_elements(); ++i) in.mask.view().data[i] = std::byte(keeps(generator));
  }
  if (terms.slopes) {
    in.slopes = Dense(stats, Layout::kBNSD, {1, p.q_heads, 1, 1});
    for (int64_t n = 0; n < p.q_heads; ++n) {
      store_from_double(in.slopes.view().data, stats, n, std::exp2(-8.0 * double(n + 1) / double(p.q_heads)));
    }
  }
  if (terms.sink) in.sink = normal_tensor(generator, stats, Layout::kBNSD, {1, p.q_heads, 1, 1});
  return in;
}

Inputs in_double(const Problem& p, const Inputs& in) {
  return {.q = as_double(in.q, p.layout),
          .k = as_double(in.k, p.layout),
          .v = as_double(in.v, p.layout),
          .dout = as_double(in.dout, p.layout),
          .dlse = as_double(in.dlse, p.layout),
          .bias = as_double(in.bias, Layout::kBNSD),
          .mask = copied(in.mask),
          .slopes = as_double(in.slopes, Layout::kBNSD),
          .sink = as_double(in.sink, Layout::kBNSD)};
}

Results results_for(const Problem& p, const Terms& terms, DType dtype, int64_t q_rows, int64_t kv_rows) {
  const DType stats = accumulator_of(dtype);
  Results results{.out = Dense(dtype, p.layout, {p.batch, p.q_heads, q_rows, p.v_dim}),
                  .max = Dense(stats, p.layout, {p.batch, p.q_heads, q_rows, 1}),
                  .sum = Dense(stats, p.layout, {p.batch, p.q_heads, q_rows, 1}),
                  .lse = Dense(stats, p.layout, {p.batch, p.q_heads, q_rows, 1}),
                  .dq = Dense(dtype, p.layout, {p.batch, p.q_heads, q_rows, p.qk_dim}),
                  .dk = Dense(dtype, p.layout, {p.batch, p.kv_heads, kv_rows, p.qk_dim}),
                  .dv = Dense(dtype, p.layout, {p.batch, p.kv_heads, kv_rows, p.v_dim})};
  if (terms.bias == Terms::Bias::kRows) {
    results.dbias = Dense(stats, Layout::kBNSD, {p.batch, p.q_heads, q_rows, p.kv_len});
  } else if (terms.bias == Terms::Bias::kShared) {
    results.dbias = Dense(stats, Layout::kBNSD, {1, p.q_heads, 1, p.kv_len});
  }
  if (terms.sink) results.dsink = Dense(stats, Layout::kBNSD, {1, p.q_heads, 1, 1});
  return results;
}

Inputs inputs_of_rank(const Problem& p, const Inputs& whole, const ShardMap& q_map, const ShardMap& kv_map,
                      int64_t rank) {
  const bool splits_bias = whole.bias.is_given() && p.bias.is_given();
  return {.q = shard_of(whole.q, p.layout, q_map, rank),
          .k = shard_of(whole.k, p.layout, kv_map, rank),
          .v = shard_of(whole.v, p.layout, kv_map, rank),
          .dout = shard_of(whole.dout, p.layout, q_map, rank),
          .dlse = shard_of(whole.dlse, p.layout, q_map, rank),
          .bias = splits_bias ? shard_of(whole.bias, Layout::kBNSD, q_map, rank) : copied(whole.bias),
          .mask = shard_of(whole.mask, Layout::kBNSD, q_map, rank),
          .slopes = copied(whole.slopes),
          .sink = copied(whole.sink)};
}

void put_back(const Results& local, const Terms& terms, const ShardMap& q_map, const ShardMap& kv_map, int64_t rank,
              const Results& whole) {
  put_rows(local.out, q_map, rank, whole.out);
  put_rows(local.lse, q_map, rank, whole.lse);
  put_rows(local.dq, q_map, rank, whole.dq);
  put_rows(local.dk, kv_map, rank, whole.dk);
  put_rows(local.dv, kv_map, rank, whole.dv);
  if (terms.bias == Terms::Bias::kRows) put_rows(local.dbias, q_map, rank, whole.dbias);
}

Extras extras_of(const Problem& p, const Terms& terms, const Inputs& in, uint64_t seed, PairGrid& grid) {
  const std::array<int64_t, 4> pairs{p.batch, p.q_heads, in.q.view().rows(), p.kv_len};
  Extras extras;
  extras.pairs.numbers.softcap = terms.softcap;
  extras.pairs.dropout = {.p = terms.dropout, .seed = seed};
  grid = {.q_begin = 0,
          .kv_begin = 0,
          .origin = 0,
          .batch_stride = static_cast<uint64_t>(p.q_heads * p.q_len * p.kv_len),
          .head_stride = static_cast<uint64_t>(p.q_len * p.kv_len),
          .row_stride = static_cast<uint64_t>(p.kv_len)};
  extras.pairs.grids = std::span(&grid, 1);
  extras.pairs.bias = expanded(ConstTensorView(in.bias.view()), pairs);
  const TensorView mask = expanded(in.mask.view(), pairs);
  if (mask.is_given()) extras.pairs.mask = {mask.data, mask.size, mask.stride};
  extras.pairs.slopes = expanded(ConstTensorView(in.slopes.view()), {p.batch, p.q_heads, 1, 1});
  extras.sink = in.sink.view();
  return extras;
}

TensorView dbias_view(const Problem& p, const Results& results) {
  return expanded(results.dbias.view(), {p.batch, p.q_heads, results.dq.view().rows(), p.kv_len});
}

}  // namespace ringspan::cli
