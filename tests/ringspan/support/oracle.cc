#include "tests/ringspan/support/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ringspan::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// In four sums, since a single one would wait for each addition to end.
double dot(const double* a, const double* b, int64_t length) {
  double sum[4] = {};
  int64_t d = 0;
  for (; d + 4 <= length; d += 4) {
    for (int64_t lane = 0; lane < 4; ++lane) sum[lane] += a[d + lane] * b[d + lane];
  }
  for (; d < length; ++d) sum[0] += a[d] * b[d];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

void add_scaled(double factor, const double* from, int64_t length, double* to) {
  for (int64_t d = 0; d < length; ++d) to[d] += factor * from[d];
}

int64_t kv_head_of(const Inputs& inputs, int64_t n) { return n * inputs.k.size[1] / inputs.q.size[1]; }

double bias_of(const PairTerms& terms, int64_t b, int64_t n, int64_t i, int64_t j) {
  return terms.bias ? terms.bias(b, n, i, j) : 0;
}

// What a kept pair's weight is multiplied with before it meets v.
double value_factor(const PairTerms& terms, int64_t b, int64_t n, int64_t i, int64_t j) {
  if (!terms.is_dropped) return 1;
  return terms.is_dropped(b, n, i, j) ? 0 : 1 / (1 - terms.dropout_p);
}

double capped(double softcap, double score) { return softcap == 0 ? score : softcap * std::tanh(score / softcap); }

// d capped / d score
double slope_of_cap(double softcap, double score) {
  return softcap == 0 ? 1 : 1 / (std::cosh(score / softcap) * std::cosh(score / softcap));
}

// Calls body(b, n, kv_head, i, j) for the kept pairs.
template <class Body>
void for_each_kept(const Inputs& inputs, const Body& body) {
  for_each_index({inputs.q.size[0], inputs.q.size[1], inputs.q.size[2], inputs.k.size[2]},
                 [&](int64_t b, int64_t n, int64_t i, int64_t j) {
                   if (inputs.keep(b, i, j) && bias_of(inputs.terms, b, n, i, j) != -kInfinity)
                     body(b, n, kv_head_of(inputs, n), i, j);
                 });
}

}  // namespace

Outputs oracle_forward(const Inputs& inputs) {
  const auto& [batch, heads, rows, qk_dim] = inputs.q.size;
  const std::array<int64_t, 4> stats{batch, heads, rows, 1};
  Outputs outputs{Array({batch, heads, rows, inputs.v.size[3]}), Array(stats, -kInfinity), Array(stats),
                  Array(stats, -kInfinity), Array({batch, heads, rows, inputs.k.size[2]})};
  Array score(outputs.p.size);
  for_each_kept(inputs, [&](int64_t b, int64_t n, int64_t g, int64_t i, int64_t j) {
    const double raw = inputs.scale * dot(inputs.q.row(b, n, i), inputs.k.row(b, g, j), inputs.q.size[3]);
    const double s = capped(inputs.terms.softcap, raw) + bias_of(inputs.terms, b, n, i, j);
    score.at(b, n, i, j) = s;
    outputs.max.at(b, n, i) = std::max(outputs.max.at(b, n, i), s);
  });
  for_each_index(stats, [&](int64_t b, int64_t n, int64_t i, int64_t) {
    if (inputs.sink.empty() || inputs.sink[n] == -kInfinity) return;
    outputs.max.at(b, n, i) = std::max(outputs.max.at(b, n, i), inputs.sink[n]);
    outputs.sum.at(b, n, i) = std::exp(inputs.sink[n] - outputs.max.at(b, n, i));
    outputs.lse.at(b, n, i) = inputs.sink[n];
  });
  for_each_kept(inputs, [&](int64_t b, int64_t n, int64_t, int64_t i, int64_t j) {
    outputs.p.at(b, n, i, j) = std::exp(score.at(b, n, i, j) - outputs.max.at(b, n, i));
    outputs.sum.at(b, n, i) += outputs.p.at(b, n, i, j);
  });
  for_each_kept(inputs, [&](int64_t b, int64_t n, int64_t g, int64_t i, int64_t j) {
    outputs.p.at(b, n, i, j) /= outputs.sum.at(b, n, i);
    outputs.lse.at(b, n, i) = outputs.max.at(b, n, i) + std::log(outputs.sum.at(b, n, i));
    const double weight = outputs.p.at(b, n, i, j) * value_factor(inputs.terms, b, n, i, j);
    add_scaled(weight, inputs.v.row(b, g, j), inputs.v.size[3], outputs.out.row(b, n, i));
  });
  return outputs;
}

Gradients oracle_backward(const Inputs& inputs, const Outputs& outputs, const Array& dout, const Array& dlse) {
  const int64_t v_dim = inputs.v.size[3];
  Gradients gradients{Array(inputs.q.size), Array(inputs.k.size), Array(inputs.v.size), Array(outputs.lse.size),
                      Array(outputs.p.size)};
  for_each_index(outputs.lse.size, [&](int64_t b, int64_t n, int64_t i, int64_t) {
    gradients.delta.at(b, n, i) =
        dot(outputs.out.row(b, n, i), dout.row(b, n, i), v_dim) - (dlse.data.empty() ? 0.0 : dlse.at(b, n, i));
  });
  for (std::size_t n = 0; n < inputs.sink.size(); ++n) {
    gradients.dsink.push_back(0);
    for_each_index({outputs.lse.size[0], 1, outputs.lse.size[2], 1}, [&](int64_t b, int64_t, int64_t i, int64_t) {
      const auto head = static_cast<int64_t>(n);
      if (inputs.sink[n] == -kInfinity) return;
      gradients.dsink[n] -= std::exp(inputs.sink[n] - outputs.lse.at(b, head, i)) * gradients.delta.at(b, head, i);
    });
  }
  for_each_kept(inputs, [&](int64_t b, int64_t n, int64_t g, int64_t i, int64_t j) {
    const double p = outputs.p.at(b, n, i, j);
    const double factor = value_factor(inputs.terms, b, n, i, j);
    const double dp = factor * dot(dout.row(b, n, i), inputs.v.row(b, g, j), v_dim);
    const double ds = p * (dp - gradients.delta.at(b, n, i));
    const double raw = inputs.scale * dot(inputs.q.row(b, n, i), inputs.k.row(b, g, j), inputs.q.size[3]);
    const double dot_gradient = inputs.scale * ds * slope_of_cap(inputs.terms.softcap, raw);
    gradients.ds.at(b, n, i, j) = ds;
    add_scaled(factor * p, dout.row(b, n, i), v_dim, gradients.dv.row(b, g, j));
    add_scaled(dot_gradient, inputs.k.row(b, g, j), inputs.q.size[3], gradients.dq.row(b, n, i));
    add_scaled(dot_gradient, inputs.q.row(b, n, i), inputs.q.size[3], gradients.dk.row(b, g, j));
  });
  return gradients;
}

HonestErrors honest_errors(const Inputs& inputs, const Outputs& outputs, const Gradients& gradients, const Array& dout,
                           DType dtype) {
  const int64_t qk_dim = inputs.q.size[3], v_dim = inputs.v.size[3];
  Array out(outputs.out.size), dq(inputs.q.size), dk(inputs.k.size), dv(inputs.v.size);
  for_each_kept(inputs, [&](int64_t b, int64_t n, int64_t g, int64_t i, int64_t j) {
    const double p = outputs.p.at(b, n, i, j), sum = outputs.sum.at(b, n, i), ds = gradients.ds.at(b, n, i, j);
    const double factor = value_factor(inputs.terms, b, n, i, j);
    const double raw = inputs.scale * dot(inputs.q.row(b, n, i), inputs.k.row(b, g, j), qk_dim);
    const double dot_gradient = ds * slope_of_cap(inputs.terms.softcap, raw);
    const double forward_error = factor * (rounded(p * sum, dtype) / sum - p);
    const double p_error = factor * (rounded(p, dtype) - p);
    const double ds_error = inputs.scale * (rounded(dot_gradient, dtype) - dot_gradient);
    add_scaled(forward_error, inputs.v.row(b, g, j), v_dim, out.row(b, n, i));
    add_scaled(p_error, dout.row(b, n, i), v_dim, dv.row(b, g, j));
    add_scaled(ds_error, inputs.k.row(b, g, j), qk_dim, dq.row(b, n, i));
    add_scaled(ds_error, inputs.q.row(b, n, i), qk_dim, dk.row(b, g, j));
  });
  return {rms(out), rms(dq), rms(dk), rms(dv)};
}

}  // namespace ringspan::test
