// The slow reference: one pair at a time, everything in double. It shares nothing with the fast kernels but the
// contract, not even kept_columns(): whether a pair is kept is asked anew for each pair.
//
//   forward    s = scale q.k      m = max s      l = sum e^(s-m)      acc = sum e^(s-m) v
//   backward   P = e^(s-lse)      dP = dout.v    dS = P (dP - delta)
//              dv += P dout       dq += scale dS k                    dk += scale dS q
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

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

// Calls pair(b, q_head, kv_head, q_row, kv_row) for each kept pair of the tiles.
template <class Pair>
void for_each_pair(std::span<const Tile> tiles, int64_t q_heads, int64_t kv_heads, const Pair& pair) {
  for (const Tile& tile : tiles) {
    for (int64_t n = 0; n < q_heads; ++n) {
      const int64_t kv_head = n / (q_heads / kv_heads);
      for (int64_t a = 0; a < tile.q_rows; ++a) {
        for (int64_t c = 0; c < tile.kv_rows; ++c) {
          const int64_t diagonal = (tile.kv_pos0 + c * tile.kv_stride) - (tile.q_pos0 + a * tile.q_stride);
          if (diagonal < tile.lo || diagonal > tile.hi) continue;
          pair(tile.batch, n, kv_head, tile.q_row0 + a, tile.kv_row0 + c);
        }
      }
    }
  }
}

double scaled_score(const ConstTensorView& q, const ConstTensorView& k, double scale, int64_t b, int64_t n,
                    int64_t kv_head, int64_t i, int64_t j) {
  double dot = 0;
  for (int64_t d = 0; d < q.dim(); ++d) dot += load(q, b, n, i, d) * load(k, b, kv_head, j, d);
  return scale * dot;
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

// A score of -inf adds nothing, and must not meet a maximum of -inf: their difference is NaN.
void add_pair(double score, const ConstTensorView& v, int64_t b, int64_t kv_head, int64_t j, double* m, double* l,
              double* acc) {
  if (score == -kInfinity) return;
  if (score > *m) {
    const double shrink = std::exp(*m - score);
    *l *= shrink;
    for (int64_t d = 0; d < v.dim(); ++d) acc[d] *= shrink;
    *m = score;
  }
  const double weight = std::exp(score - *m);
  *l += weight;
  for (int64_t d = 0; d < v.dim(); ++d) acc[d] += weight * load(v, b, kv_head, j, d);
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
  if (sink.data == nullptr) return;
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

void write_output(DenseState& state, const OutputView& output) {
  for_each_element(state.acc.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
    const double m = state.max.at(b, n, s);
    const double l = state.sum.at(b, n, s);
    const bool empty = l == 0;  // not m == -inf: a NaN score leaves m there and makes l NaN
    if (d == 0) {
      store(output.max, b, n, s, 0, m);
      store(output.sum, b, n, s, 0, l);
      store(output.lse, b, n, s, 0, empty ? -kInfinity : m + std::log(l));
    }
    store(output.out, b, n, s, d, empty ? 0.0 : state.acc.at(b, n, s, d) / l);
  });
}

void write_gradient(Dense& gradient, bool begin, const TensorView& to) {
  for_each_element(gradient.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
    const double before = begin ? 0.0 : load(to, b, n, s, d);
    store(to, b, n, s, d, before + gradient.at(b, n, s, d));
  });
}

struct DenseGradients {
  Dense dq, dk, dv;
};

void add_pair_gradient(const BackwardArgs& args, int64_t b, int64_t n, int64_t kv_head, int64_t i, int64_t j,
                       DenseGradients* gradients) {
  const double lse = load(args.lse, b, n, i);
  if (lse == -kInfinity) return;  // the empty row
  const double p = std::exp(scaled_score(args.q, args.k, args.scale, b, n, kv_head, i, j) - lse);
  double dp = 0;
  for (int64_t d = 0; d < args.v.dim(); ++d) dp += load(args.dout, b, n, i, d) * load(args.v, b, kv_head, j, d);
  const double ds = args.scale * p * (dp - load(args.delta, b, n, i));
  for (int64_t d = 0; d < args.v.dim(); ++d) gradients->dv.at(b, kv_head, j, d) += p * load(args.dout, b, n, i, d);
  for (int64_t d = 0; d < args.q.dim(); ++d) {
    gradients->dq.at(b, n, i, d) += ds * load(args.k, b, kv_head, j, d);
    gradients->dk.at(b, kv_head, j, d) += ds * load(args.q, b, n, i, d);
  }
}

}  // namespace

void attend_reference(const ForwardArgs& args) {
  DenseState state = initial_state(args);
  for_each_pair(
      args.tiles, args.q.heads(), args.k.heads(), [&](int64_t b, int64_t n, int64_t kv_head, int64_t i, int64_t j) {
        const double score = scaled_score(args.q, args.k, args.scale, b, n, kv_head, i, j);
        add_pair(score, args.v, b, kv_head, j, &state.max.at(b, n, i), &state.sum.at(b, n, i), state.acc.row(b, n, i));
      });
  if (args.finish) {
    add_sinks(args.sink, state);
    write_output(state, args.output);
  } else {
    write_state(state, args.state);
  }
}

void attend_backward_reference(const BackwardArgs& args) {
  DenseGradients gradients{Dense(args.q.size), Dense(args.k.size), Dense(args.v.size)};
  for_each_pair(args.tiles, args.q.heads(), args.k.heads(),
                [&](int64_t b, int64_t n, int64_t kv_head, int64_t i, int64_t j) {
                  add_pair_gradient(args, b, n, kv_head, i, j, &gradients);
                });
  write_gradient(gradients.dq, args.dq_begin, args.dq);
  if (args.before_accumulate) args.before_accumulate();
  write_gradient(gradients.dk, args.dkv_begin, args.dk);
  write_gradient(gradients.dv, args.dkv_begin, args.dv);
}

}  // namespace ringspan
