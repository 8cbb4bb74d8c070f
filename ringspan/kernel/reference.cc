// The slow reference: one pair at a time, everything in double. It shares nothing with the fast kernels but the
// contract, not even kept_columns(): whether a pair is kept is asked anew for each pair.
//
//   forward    s = scale q.k      m = max s      l = sum e^(s-m)      acc = sum e^(s-m) v
//   backward   P = e^(s-lse)      dP = M dout.v    dS = P (dP - delta)     (M, and what else enters s: pair_inputs.h)
//              dv += M P dout     dq += scale dS k                      dk += scale dS q
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "ringspan/base/philox.h"
#include "ringspan/kernel/attention.h"

namespace ringspan {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double load(const ConstTensorView& view, int64_t b, int64_t n, int64_t s, int64_t d = 0) {
  return load_as_double(view.data, view.dtype, view.offset(b, n, s, d));
}

void store(const TensorView& view, int64_t b, int64_t n, int64_t s, int64_t d, double value) {
  store_from_double(view.data, view.dtype, view.offset(b, n, s, d), value);
}

// A dense [batch, heads, rows, dim] array of double.
struct Dense {
  explicit Dense(const std::array<int64_t, 4>& size)
      : size(size), data(static_cast<std::size_t>(size[0] * size[1] * size[2] * size[3]), 0.0) {}

  double* row(int64_t b, int64_t n, int64_t s) { return data.data() + ((b * size[1] + n) * size[2] + s) * size[3]; }
  double& at(int64_t b, int64_t n, int64_t s, int64_t d = 0) { return row(b, n, s)[d]; }

  std::array<int64_t, 4> size;
  std::vector<double> data;
};

template <class Body>
void for_each_element(const std::array<int64_t, 4>& size, const Body& body) {
  for (int64_t b = 0; b < size[0]; ++b)
    for (int64_t n = 0; n < size[1]; ++n)
      for (int64_t s = 0; s < size[2]; ++s)
        for (int64_t d = 0; d < size[3]; ++d) body(b, n, s, d);
}

Dense load_all(const ConstTensorView& view) {
  Dense dense(view.size);
  for_each_element(view.size,
                   [&](int64_t b, int64_t n, int64_t s, int64_t d) { dense.at(b, n, s, d) = load(view, b, n, s, d); });
  return dense;
}

// A pair: its place in the tensors, and its global positions.
struct Pair {
  int64_t b, n, kv_head, i, j;
  int64_t q_pos, kv_pos;
};

// Calls pair(...) for each kept pair of the tiles.
template <class Body>
void for_each_pair(std::span<const Tile> tiles, int64_t q_heads, int64_t kv_heads, const Body& body) {
  for (const Tile& tile : tiles) {
    for (int64_t n = 0; n < q_heads; ++n) {
      const int64_t kv_head = n / (q_heads / kv_heads);
      for (int64_t a = 0; a < tile.q_rows; ++a) {
        for (int64_t c = 0; c < tile.kv_rows; ++c) {
          const int64_t q_pos = tile.q_pos0 + a * tile.q_stride, kv_pos = tile.kv_pos0 + c * tile.kv_stride;
          if (kv_pos - q_pos < tile.lo || kv_pos - q_pos > tile.hi) continue;
          body(Pair{tile.batch, n, kv_head, tile.q_row0 + a, tile.kv_row0 + c, q_pos, kv_pos});
        }
      }
    }
  }
}

const PairGrid& grid_of(const PairInputs& inputs, const Pair& pair) {
  std::size_t last = 0;
  while (last + 1 < inputs.grids.size() && inputs.grids[last + 1].q_begin <= pair.q_pos) ++last;
  return inputs.grids[last];
}

bool is_masked(const PairInputs& inputs, const Pair& pair) {
  const ByteMaskView& mask = inputs.mask;
  if (!mask.is_given()) return false;
  int64_t row = pair.i, column = pair.kv_pos;
  if (mask.rows_are_grids) {
    const PairGrid& grid = grid_of(inputs, pair);
    row = pair.q_pos - grid.q_begin;
    column = pair.kv_pos - grid.kv_begin;
  }
  const int64_t at = pair.b * mask.stride[0] + pair.n * mask.stride[1] + row * mask.stride[2] + column * mask.stride[3];
  return (mask.data[at] != std::byte{0}) == mask.masked_value;
}

bool is_dropped(const PairInputs& inputs, const Pair& pair) {
  if (!inputs.drops()) return false;
  const PairGrid& grid = grid_of(inputs, pair);
  const uint64_t index = grid.origin + static_cast<uint64_t>(pair.b) * grid.batch_stride +
                         static_cast<uint64_t>(pair.n) * grid.head_stride +
                         static_cast<uint64_t>(pair.q_pos - grid.q_begin) * grid.row_stride +
                         static_cast<uint64_t>(pair.kv_pos - grid.kv_begin);
  return draw_of_pair(inputs.dropout.seed, inputs.dropout.offset, index) >= keep_threshold(inputs.dropout.p);
}

double slope_part(const PairInputs& inputs, const Pair& pair) {
  if (!inputs.slopes.is_given()) return 0;
  const PairGrid& grid = grid_of(inputs, pair);
  const double distance =
      std::abs(static_cast<double>((pair.kv_pos - grid.kv_begin) - (pair.q_pos - grid.q_begin) + inputs.slope_shift));
  return -load(inputs.slopes, pair.b, pair.n, 0) * (inputs.slope_of_root ? std::sqrt(distance) : distance);
}

struct Score {
  double value;       // -inf: the pair takes no part
  double derivative;  // of the value by scale q.k
};

Score score_of(const ConstTensorView& q, const ConstTensorView& k, double scale, const PairInputs& inputs,
               const Pair& pair) {
  const double bias = !inputs.bias.is_given() ? 0 : load(inputs.bias, pair.b, pair.n, pair.i, pair.kv_pos);
  if (bias == -kInfinity || is_masked(inputs, pair)) return {-kInfinity, 0};
  double dot = 0;
  for (int64_t d = 0; d < q.dim(); ++d)
    dot += load(q, pair.b, pair.n, pair.i, d) * load(k, pair.b, pair.kv_head, pair.j, d);
  Score score{scale * dot, 1};
  if (inputs.numbers.softcap != 0) {
    const double t = std::tanh(score.value / inputs.numbers.softcap);
    score = {inputs.numbers.softcap * t, 1 - t * t};
  }
  score.value += inputs.bias_factor * bias + slope_part(inputs, pair);
  return score;
}

struct DenseState {
  Dense max, sum, acc;
};

DenseState initial_state(const ForwardArgs& args) {
  if (!args.begin) return {load_all(args.state.max), load_all(args.state.sum), load_all(args.state.acc)};
  const auto [batch, heads, rows, dim] = args.q.size;
  DenseState state{Dense({batch, heads, rows, 1}), Dense({batch, heads, rows, 1}),
                   Dense({batch, heads, rows, args.v.dim()})};
  for (double& m : state.max.data) m = -kInfinity;
  return state;
}

// A score of -inf adds nothing, and must not meet a maximum of -inf: their difference is NaN. `value`: the factor of v.
void add_pair(double score, double value, const ConstTensorView& v, const Pair& pair, DenseState* state) {
  if (score == -kInfinity) return;
  double& m = state->max.at(pair.b, pair.n, pair.i);
  double& l = state->sum.at(pair.b, pair.n, pair.i);
  double* acc = state->acc.row(pair.b, pair.n, pair.i);
  if (score > m) {
    const double shrink = std::exp(m - score);
    l *= shrink;
    for (int64_t d = 0; d < v.dim(); ++d) acc[d] *= shrink;
    m = score;
  }
  const double weight = std::exp(score - m);
  l += weight;
  if (value == 0) return;
  for (int64_t d = 0; d < v.dim(); ++d) acc[d] += value * weight * load(v, pair.b, pair.kv_head, pair.j, d);
}

void write_state(DenseState& state, const SoftmaxState& to) {
  for_each_element(state.acc.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
    if (d == 0) {
      store(to.max, b, n, s, 0, state.max.at(b, n, s));
      store(to.sum, b, n, s, 0, state.sum.at(b, n, s));
    }
    store(to.acc, b, n, s, d, state.acc.at(b, n, s, d));
  });
}

// One more key for every row, with the score of its head's sink and no value.
void add_sinks(const ConstTensorView& sink, DenseState& state) {
  if (!sink.is_given()) return;
  for_each_element(state.max.size, [&](int64_t b, int64_t n, int64_t s, int64_t) {
    const double score = load(sink, 0, n, 0);
    if (score == -kInfinity) return;
    double &m = state.max.at(b, n, s), &l = state.sum.at(b, n, s), *acc = state.acc.row(b, n, s);
    const double joint = std::max(m, score), shrink = std::exp(m - joint);
    l = l * shrink + std::exp(score - joint);
    for (int64_t d = 0; d < state.acc.size[3]; ++d) acc[d] *= shrink;
    m = joint;
  });
}

void write_output(DenseState& state, double rescale, const OutputView& output) {
  for_each_element(state.acc.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
    const double m = state.max.at(b, n, s);
    const double l = state.sum.at(b, n, s);
    const bool empty = l == 0;  // not m == -inf: a NaN score leaves m there and makes l NaN
    if (d == 0) {
      store(output.max, b, n, s, 0, m);
      store(output.sum, b, n, s, 0, l);
      store(output.lse, b, n, s, 0, empty ? -kInfinity : m + std::log(l));
    }
    store(output.out, b, n, s, d, empty ? 0.0 : rescale * state.acc.at(b, n, s, d) / l);
  });
}

void write_gradient(Dense& gradient, bool begin, const TensorView& to) {
  for_each_element(gradient.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
    const double before = begin ? 0.0 : load(to, b, n, s, d);
    store(to, b, n, s, d, before + gradient.at(b, n, s, d));
  });
}

double rescale_of(const PairInputs& inputs) { return inputs.drops() ? 1 / (1 - inputs.dropout.p) : 1; }

struct DenseGradients {
  Dense dq, dk, dv;
};

void add_pair_gradient(const BackwardArgs& args, const Pair& pair, DenseGradients* gradients) {
  const auto [b, n, kv_head, i, j, q_pos, kv_pos] = pair;
  const double lse = load(args.lse, b, n, i);
  if (lse == -kInfinity) return;  // the empty row
  const Score score = score_of(args.q, args.k, args.scale, args.pairs, pair);
  if (score.value == -kInfinity) return;
  const double p = std::exp(score.value - lse);
  const double kept = is_dropped(args.pairs, pair) ? 0 : rescale_of(args.pairs);
  double dp = 0;
  for (int64_t d = 0; d < args.v.dim() && kept != 0; ++d) {
    dp += kept * load(args.dout, b, n, i, d) * load(args.v, b, kv_head, j, d);
    gradients->dv.at(b, kv_head, j, d) += kept * p * load(args.dout, b, n, i, d);
  }
  const double ds = p * (dp - load(args.delta, b, n, i));
  if (args.dbias.is_given()) {
    store(args.dbias, b, n, i, kv_pos, load(args.dbias, b, n, i, kv_pos) + args.pairs.bias_factor * ds);
  }
  const double dot = args.scale * ds * score.derivative;
  for (int64_t d = 0; d < args.q.dim(); ++d) {
    gradients->dq.at(b, n, i, d) += dot * load(args.k, b, kv_head, j, d);
    gradients->dk.at(b, kv_head, j, d) += dot * load(args.q, b, n, i, d);
  }
}

}  // namespace

void attend_reference(const ForwardArgs& args) {
  DenseState state = initial_state(args);
  for_each_pair(args.tiles, args.q.heads(), args.k.heads(), [&](const Pair& pair) {
    const double score = score_of(args.q, args.k, args.scale, args.pairs, pair).value;
    add_pair(score, is_dropped(args.pairs, pair) ? 0 : 1, args.v, pair, &state);
  });
  if (args.finish) {
    add_sinks(args.sink, state);
    write_output(state, rescale_of(args.pairs), args.output);
  } else {
    write_state(state, args.state);
  }
}

void attend_backward_reference(const BackwardArgs& args) {
  DenseGradients gradients{Dense(args.q.size), Dense(args.k.size), Dense(args.v.size)};
  for_each_pair(args.tiles, args.q.heads(), args.k.heads(),
                [&](const Pair& pair) { add_pair_gradient(args, pair, &gradients); });
  if (args.wants_dq) write_gradient(gradients.dq, args.dq_begin, args.dq);
  if (args.before_accumulate) args.before_accumulate();
  if (!args.wants_dkv) return;
  write_gradient(gradients.dk, args.dkv_begin, args.dk);
  write_gradient(gradients.dv, args.dkv_begin, args.dv);
}

}  // namespace ringspan
