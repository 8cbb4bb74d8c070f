// Tolerances
//   fp32   out, max, sum, lse 1e-5 and gradients 5e-5 of the largest reference value; fp64 1e-12
//   bf16, fp16   statistics and gradients come in fp32, out in the dtype. Products of two inputs are exact in fp32,
//          so lse and max keep the bounds of fp32. A kernel may round P and dS to the dtype to feed them to the second
//          products, and rounds `out` on the way out. Independent errors add as squares, so the RMS error is at most
//              1.1 sqrt(rounding^2 + honest^2) + 1e-5 rms(reference)
//          where `rounding` and `honest` are measured, by making just these roundings in the oracle (honest_errors()),
//          and the last term is fp32 arithmetic.
#include "tests/ringspan/support/attention_case.h"

#include <bit>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"

namespace ringspan::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

bool is_narrow(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

void poison_uncovered_rows(const std::vector<std::vector<bool>>& covered, Array* array) {
  for_each_index(array->size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
    if (!covered[static_cast<std::size_t>(b)][static_cast<std::size_t>(s)]) array->at(b, n, s, d) = kNan;
  });
}

Array amplified(Array array, double factor, DType dtype) {
  for (double& value : array.data) value *= factor;
  return rounded(array, dtype);
}

void expect_max_error(const char* name, const Array& got, const Array& want, double tolerance) {
  EXPECT_LE(max_error(got, want), tolerance) << name;
}

void expect_rms_error(const char* name, const Array& got, const Array& want, DType stored_as, double honest) {
  for (const double value : got.data) ASSERT_TRUE(std::isfinite(value)) << name;
  const double rounding = stored_as == DType::kF32 ? 0 : rms_error(rounded(want, stored_as), want);
  const double bound = 1.1 * std::hypot(rounding, honest) + 1e-5 * rms(want);
  EXPECT_LE(rms_error(got, want), bound) << name << ", rounding " << rounding << ", honest " << honest;
}

void expect_same_bits(const char* name, const Array& a, const Array& b) {
  ASSERT_EQ(a.size, b.size) << name;
  for (std::size_t i = 0; i < a.data.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint64_t>(a.data[i]), std::bit_cast<uint64_t>(b.data[i]))
        << name << " at " << i << ": " << a.data[i] << " and " << b.data[i];
  }
}

std::vector<std::vector<Tile>> tiles_of_calls(const AttentionCase& c, int64_t num_calls) {
  std::vector<std::vector<Tile>> calls;
  if (num_calls == 1) return {c.tiles};
  for (int64_t call = 0; call < num_calls; ++call) {
    calls.push_back(cut_tiles(c.tiles, c.spec.kv_len * call / num_calls, c.spec.kv_len * (call + 1) / num_calls));
  }
  return calls;
}

}  // namespace

std::string CaseSpec::name() const {
  return concat(ringspan::name_of(dtype), "_b", batch, "_h", q_heads, "_", kv_heads, "_s", q_len, "_", kv_len, "_d",
                qk_dim, "_", v_dim, "_", test::name_of(mask));
}

std::ostream& operator<<(std::ostream& stream, const CaseSpec& spec) { return stream << spec.name(); }

AttentionCase::AttentionCase(const CaseSpec& s, const PairTerms& terms) : spec(s) {
  Mask mask = make_mask(s.mask, s.batch, s.q_len, s.kv_len);
  tiles = std::move(mask.tiles);
  inputs.keep = std::move(mask.keep);
  inputs.terms = terms;
  inputs.scale = s.scale.value_or(1 / std::sqrt(static_cast<double>(s.qk_dim)));
  inputs.q =
      amplified(random_array(4 * s.seed, {s.batch, s.q_heads, s.q_len, s.qk_dim}, s.dtype), s.amplitude, s.dtype);
  inputs.k =
      amplified(random_array(4 * s.seed + 1, {s.batch, s.kv_heads, s.kv_len, s.qk_dim}, s.dtype), s.amplitude, s.dtype);
  inputs.v = random_array(4 * s.seed + 2, {s.batch, s.kv_heads, s.kv_len, s.v_dim}, s.dtype);
  dout = random_array(4 * s.seed + 3, {s.batch, s.q_heads, s.q_len, s.v_dim}, s.dtype);
  dlse = random_array(4 * s.seed + 7, {s.batch, s.q_heads, s.q_len, 1}, accumulator_of(s.dtype));

  const auto q_rows = covered_q_rows(tiles, s.batch, s.q_len), kv_rows = covered_kv_rows(tiles, s.batch, s.kv_len);
  poison_uncovered_rows(q_rows, &inputs.q);
  poison_uncovered_rows(q_rows, &dout);
  poison_uncovered_rows(kv_rows, &inputs.k);
  poison_uncovered_rows(kv_rows, &inputs.v);

  want = oracle_forward(inputs);
  want_grads = oracle_backward(inputs, want, dout, dlse);
  if (is_narrow(s.dtype)) honest = honest_errors(inputs, want, want_grads, dout, s.dtype);
}

std::shared_ptr<const AttentionCase> make_case(const CaseSpec& spec) {
  static std::string last_key;
  static std::shared_ptr<const AttentionCase> last;
  const std::string key = concat(spec.name(), " ", spec.scale.value_or(INFINITY), " ", spec.amplitude, " ", spec.seed);
  if (key != last_key) {
    last = std::make_shared<const AttentionCase>(spec);
    last_key = key;
  }
  return last;
}

Kernels kernels_of(Isa isa) {
  const auto forced = [isa](const auto& call) {
    force_isa(isa);
    EXPECT_EQ(name_of(call()), std::string(name_of(isa)));
    force_isa(std::nullopt);
  };
  return {[forced](const ForwardArgs& args, Workspace& workspace, const Parallel& parallel) {
            forced([&] { return attend(args, workspace, parallel); });
          },
          [forced](const BackwardArgs& args, Workspace& workspace, const Parallel& parallel) {
            forced([&] { return attend_backward(args, workspace, parallel); });
          }};
}

std::ostream& operator<<(std::ostream& stream, const Target& target) { return stream << target.name; }

std::vector<Target> native_targets() {
  std::vector<Target> targets;
  for (const Isa isa : available_isas()) targets.push_back({name_of(isa), kernels_of(isa)});
  return targets;
}

std::vector<Target>& added_targets() {
  static std::vector<Target> targets;
  return targets;
}

std::vector<Target> all_targets() {
  std::vector<Target> targets = native_targets();
  targets.insert(targets.end(), added_targets().begin(), added_targets().end());
  return targets;
}

Kernels reference_kernels() {
  return {[](const ForwardArgs& args, Workspace&, const Parallel&) { attend_reference(args); },
          [](const BackwardArgs& args, Workspace&, const Parallel&) { attend_backward_reference(args); }};
}

ForwardResult run_forward(const AttentionCase& c, const Kernels& kernels, const RunOptions& options) {
  const auto tensor = [&](const Array& values) { return Tensor(values, c.spec.dtype, options.order, options.gap); };
  const Tensor q = tensor(c.inputs.q), k = tensor(c.inputs.k), v = tensor(c.inputs.v);
  const DType wide = accumulator_of(c.spec.dtype);
  const std::array<int64_t, 4> stats{c.spec.batch, c.spec.q_heads, c.spec.q_len, 1};
  // NaN in what is only written: a row that is left out is seen.
  const auto output = [&](DType dtype, std::array<int64_t, 4> size) {
    return Tensor(dtype, size, options.order, options.gap, kNan);
  };
  Tensor out = output(c.spec.dtype, c.want.out.size), max = output(wide, stats), sum = output(wide, stats),
         lse = output(wide, stats);
  Tensor state_max = output(wide, stats), state_sum = output(wide, stats), acc = output(wide, c.want.out.size);

  const Tensor sink = options.sink.empty()
                          ? Tensor()
                          : Tensor(array_of({1, c.spec.q_heads, 1, 1}, options.sink), wide, {0, 1, 2, 3}, 2);

  Workspace fresh;
  const Serial serial;
  const auto calls = tiles_of_calls(c, options.num_calls);
  for (std::size_t call = 0; call < calls.size(); ++call) {
    ForwardArgs args;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.tiles = calls[call];
    args.scale = c.inputs.scale;
    args.begin = call == 0;
    args.finish = call + 1 == calls.size();
    args.pairs = options.pairs;
    if (calls.size() > 1) args.state = {state_max.view(), state_sum.view(), acc.view()};
    if (args.finish) {
      args.output = {out.view(), max.view(), sum.view(), lse.view()};
      args.sink = sink.view();
    }
    kernels.forward(args, options.workspace ? *options.workspace : fresh,
                    options.parallel ? *options.parallel : serial);
  }
  return {out.array(), max.array(), sum.array(), lse.array()};
}

BackwardResult run_backward(const AttentionCase& c, const Kernels& kernels, const RunOptions& options) {
  const auto tensor = [&](const Array& values, DType dtype) {
    return Tensor(values, dtype, options.order, options.gap);
  };
  const DType dtype = c.spec.dtype, wide = accumulator_of(dtype);
  const Tensor q = tensor(c.inputs.q, dtype), k = tensor(c.inputs.k, dtype), v = tensor(c.inputs.v, dtype),
               dout = tensor(c.dout, dtype);
  const Tensor lse = tensor(rounded(c.want.lse, wide), wide), delta = tensor(rounded(c.want_grads.delta, wide), wide);
  const auto output = [&](const Array& like) { return Tensor(wide, like.size, options.order, options.gap, kNan); };
  Tensor dq = output(c.inputs.q), dk = output(c.inputs.k), dv = output(c.inputs.v);

  Workspace fresh;
  const Serial serial;
  const auto calls = tiles_of_calls(c, options.num_calls);
  for (std::size_t call = 0; call < calls.size(); ++call) {
    BackwardArgs args;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.dout = dout.view();
    args.lse = lse.view();
    args.delta = delta.view();
    args.tiles = calls[call];
    args.scale = c.inputs.scale;
    args.dq = dq.view();
    args.dk = dk.view();
    args.dv = dv.view();
    args.dq_begin = args.dkv_begin = call == 0;
    args.pairs = options.pairs;
    args.dbias = options.dbias;
    int num_announced = 0;
    if (options.is_announced) args.before_accumulate = [&] { ++num_announced; };
    kernels.backward(args, options.workspace ? *options.workspace : fresh,
                     options.parallel ? *options.parallel : serial);
    EXPECT_EQ(num_announced, options.is_announced ? 1 : 0);
  }
  return {dq.array(), dk.array(), dv.array()};
}

void expect_accurate(const AttentionCase& c, const ForwardResult& result) {
  const double tolerance = c.spec.dtype == DType::kF64 ? 1e-12 : 1e-5;
  expect_max_error("max", result.max, c.want.max, tolerance);
  expect_max_error("sum", result.sum, c.want.sum, tolerance);
  expect_max_error("lse", result.lse, c.want.lse, tolerance);
  if (is_narrow(c.spec.dtype)) {
    expect_rms_error("out", result.out, c.want.out, c.spec.dtype, c.honest.out);
  } else {
    expect_max_error("out", result.out, c.want.out, tolerance);
  }
}

void expect_accurate(const AttentionCase& c, const BackwardResult& result) {
  if (is_narrow(c.spec.dtype)) {
    expect_rms_error("dq", result.dq, c.want_grads.dq, DType::kF32, c.honest.dq);
    expect_rms_error("dk", result.dk, c.want_grads.dk, DType::kF32, c.honest.dk);
    expect_rms_error("dv", result.dv, c.want_grads.dv, DType::kF32, c.honest.dv);
    return;
  }
  const double tolerance = c.spec.dtype == DType::kF64 ? 1e-12 : 5e-5;
  expect_max_error("dq", result.dq, c.want_grads.dq, tolerance);
  expect_max_error("dk", result.dk, c.want_grads.dk, tolerance);
  expect_max_error("dv", result.dv, c.want_grads.dv, tolerance);
}

void expect_same(const ForwardResult& a, const ForwardResult& b) {
  expect_same_bits("out", a.out, b.out);
  expect_same_bits("max", a.max, b.max);
  expect_same_bits("sum", a.sum, b.sum);
  expect_same_bits("lse", a.lse, b.lse);
}

void expect_same(const BackwardResult& a, const BackwardResult& b) {
  expect_same_bits("dq", a.dq, b.dq);
  expect_same_bits("dk", a.dk, b.dk);
  expect_same_bits("dv", a.dv, b.dv);
}

}  // namespace ringspan::test
