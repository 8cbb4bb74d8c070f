// Random calls on in-process ranks against the oracle: problem, mask of up to 8 bands, maps, world 1 to 6, layout,
// dtype, grouped heads, and everything that changes single pairs, forward and all gradients.
//
//   RINGSPAN_DRAWS=50000 RINGSPAN_SEED=1 ringspan_tests --gtest_filter='RingProperty.*'      more of them
//   RINGSPAN_DRAWS=1 RINGSPAN_SEED=1234                                                      the one that failed
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <sstream>

#include <gtest/gtest.h>

#include "ringspan/base/philox.h"
#include "ringspan/kernel/isa.h"
#include "ringspan/ring/ring_attention.h"

#include "tests/ringspan/support/oracle.h"
#include "tests/ringspan/support/ring_run.h"

namespace ringspan {
namespace {

using test::Array;
using test::RingInputs;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Source {
 public:
  explicit Source(uint64_t seed) : engine_(seed) {}
  int64_t in(int64_t least, int64_t most) { return least + static_cast<int64_t>(engine_() % (most - least + 1)); }
  bool chance(int percent) { return in(0, 99) < percent; }
  double real() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  template <class T>
  T of(const std::vector<T>& choices) {
    return choices[static_cast<std::size_t>(in(0, static_cast<int64_t>(choices.size()) - 1))];
  }
  template <class T>
  T of(std::initializer_list<T> choices) {
    return *(choices.begin() + in(0, static_cast<int64_t>(choices.size()) - 1));
  }
  uint64_t word() { return engine_(); }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
};

struct Draw {
  Problem problem;
  std::vector<std::vector<Band>> bands{};
  ShardMap q_map = ShardMap::contiguous(0, 1), kv_map = ShardMap::contiguous(0, 1);
  Schedule schedule = Schedule::kRing;
  GradRoute route = GradRoute::kFromNext;
  RingInputs in{};
  test::Keep keep{};
};

Problem draw_problem(Source& source) {
  Problem p;
  p.batch = source.in(1, 2);
  p.kv_heads = source.in(1, 3);
  p.q_heads = p.kv_heads * source.in(1, 3);
  p.q_len = source.chance(5) ? 0 : source.in(1, 44);
  p.kv_len = source.chance(60) ? p.q_len : source.chance(5) ? 0 : source.in(1, 44);
  p.qk_dim = source.in(1, 20);
  p.v_dim = source.in(1, 20);
  p.dtype = source.of({DType::kF32, DType::kF32, DType::kF64, DType::kBF16, DType::kF16});
  p.layout = source.of({Layout::kBNSD, Layout::kBSND, Layout::kBSH, Layout::kSBH, Layout::kTND});
  if (p.layout == Layout::kTND) p.batch = 1;
  p.scale = source.chance(70) ? default_scale(p.qk_dim) : source.chance(15) ? 0 : source.real() - 0.5;
  return p;
}

std::vector<Band> draw_bands(Source& source, const Problem& p) {
  std::vector<Band> bands;
  for (int64_t count = source.chance(20) ? 0 : source.in(1, 8); count > 0; --count) {
    const auto range = [&](int64_t length) {
      const int64_t a = source.in(0, length), b = source.in(0, length);
      return source.chance(30) ? std::pair(int64_t{0}, length) : std::pair(std::min(a, b), std::max(a, b));
    };
    const auto [q_begin, q_end] = range(p.q_len);
    const auto [kv_begin, kv_end] = range(p.kv_len);
    const int64_t lo = source.chance(30) ? -kNoDiagonal : source.in(-50, 50);
    const int64_t hi = source.chance(30) ? kNoDiagonal : source.in(-50, 50);
    bands.push_back({q_begin, q_end, kv_begin, kv_end, std::min(lo, hi), std::max(lo, hi)});
  }
  return bands;
}

ShardMap draw_map(Source& source, int64_t length, int64_t world, const MaskSpec& mask) {
  switch (source.in(0, 5)) {
    case 0: return ShardMap::contiguous(length, world);
    case 1: return ShardMap::head_tail(length, world);
    case 2: return ShardMap::striped(length, world);
    case 3: {
      std::vector<int64_t> lengths(world, 0);
      for (int64_t i = 0; i < length; ++i) ++lengths[source.in(0, world - 1)];
      return ShardMap::from_lengths(lengths);
    }
    case 4:
      // A map by work needs a square mask.
      if (mask.q_len() == mask.kv_len() && mask.q_len() == length) return ShardMap::balanced(mask, world);
      return ShardMap::striped(length, world);
    default: break;
  }
  // Positions in any order, with padding rows between them.
  std::vector<int64_t> order(length);
  for (int64_t i = 0; i < length; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), source.engine());
  std::vector<std::vector<Segment>> segments(world);
  std::vector<int64_t> rows(world, 0);
  for (const int64_t position : order) {
    const int64_t rank = source.in(0, world - 1);
    rows[rank] += source.chance(10) ? 1 : 0;
    segments[rank].push_back({rows[rank]++, position, 1, 1});
  }
  for (int64_t& count : rows) count += source.chance(20) ? 2 : 0;
  return ShardMap::from_segments(length, {segments}, rows);
}

void draw_pairs(Source& source, Draw& draw) {
  const Problem& p = draw.problem;
  const auto share = [&](int64_t size) { return source.chance(40) ? int64_t{1} : size; };
  if (source.chance(30)) {
    draw.in.bias =
        test::random_array(source.word(), {share(p.batch), share(p.q_heads), share(p.q_len), p.kv_len}, p.dtype);
    for (double& value : draw.in.bias.data) value = source.chance(10) ? -kInfinity : value;
  }
  if (source.chance(25)) {
    draw.in.mask = Array({share(p.batch), share(p.q_heads), p.q_len, p.kv_len});
    for (double& value : draw.in.mask.data) value = source.chance(70);
  }
  if (source.chance(30)) {
    for (int64_t n = 0; n < p.q_heads; ++n) {
      draw.in.sink.push_back(test::rounded(source.chance(10) ? -kInfinity : 6 * source.real() - 3, DType::kF32));
    }
  }
  if (source.chance(25)) draw.in.softcap = source.of({0.75, 2.0, 30.0});
  if (source.chance(30)) draw.in.dropout = {source.of({0.1, 0.5, 0.9}), source.word(), source.word()};
}

Draw make_draw(uint64_t seed) {
  Source source(seed);
  Draw draw{.problem = draw_problem(source)};
  const Problem& p = draw.problem;
  const int64_t lists = source.chance(50) ? 1 : p.batch;
  for (int64_t b = 0; b < lists; ++b) draw.bands.push_back(draw_bands(source, p));
  draw.keep = [bands = draw.bands](int64_t b, int64_t i, int64_t j) {
    for (const Band& band : bands[bands.size() == 1 ? 0 : b]) {
      if (band.q_begin <= i && i < band.q_end && band.kv_begin <= j && j < band.kv_end && band.lo <= j - i &&
          j - i <= band.hi) {
        return true;
      }
    }
    return false;
  };
  const MaskSpec mask(p.q_len, p.kv_len, draw.bands);
  const int64_t world = source.in(1, 6);
  draw.q_map = draw_map(source, p.q_len, world, mask);
  draw.kv_map = p.q_len == p.kv_len && source.chance(50) ? draw.q_map : draw_map(source, p.kv_len, world, mask);
  draw.route = source.of({GradRoute::kFromOwner, GradRoute::kFromNext});
  draw.in = test::random_inputs(source.word() >> 8, p);
  if (source.chance(50)) {
    draw.in.dlse = test::random_array(source.word(), {p.batch, p.q_heads, p.q_len, 1}, accumulator_of(p.dtype));
  }
  draw_pairs(source, draw);
  draw.schedule = source.of(schedules_for(world));
  test::describe_row_tensors(draw.in, draw.problem);
  return draw;
}

test::Inputs oracle_inputs(const Draw& draw) {
  const Problem& p = draw.problem;
  const RingInputs& in = draw.in;
  test::Inputs inputs{in.q, in.k, in.v, p.scale, draw.keep};
  inputs.sink = in.sink;
  inputs.terms.softcap = in.softcap;
  inputs.terms.bias = [&in](int64_t b, int64_t n, int64_t i, int64_t j) {
    const auto at = [&](const Array& x) { return x.at(b % x.size[0], n % x.size[1], i % x.size[2], j); };
    if (!in.mask.data.empty() && at(in.mask) == 0) return -kInfinity;
    return in.bias.data.empty() ? 0.0 : at(in.bias);
  };
  if (in.dropout.p == 0) return inputs;
  inputs.terms.dropout_p = in.dropout.p;
  inputs.terms.is_dropped = [&in, p](int64_t b, int64_t n, int64_t i, int64_t j) {
    const auto index = static_cast<uint64_t>(((b * p.q_heads + n) * p.q_len + i) * p.kv_len + j);
    return draw_of_pair(in.dropout.seed, in.dropout.offset, index) >= keep_threshold(in.dropout.p);
  };
  return inputs;
}

double largest(const Array& array) {
  double most = 0;
  for (const double value : array.data) most = std::isfinite(value) ? std::max(most, std::abs(value)) : most;
  return most;
}

// How large the terms are of which gradients are sums: rounding is relative to these where they cancel.
struct Sizes {
  double score = 0;  // of dS and of sums of dS
  double q = 0, k = 0, v = 0;
};
Sizes sizes_of(const test::Inputs& inputs, const test::Outputs& outputs, const test::Gradients& gradients,
               const Array& dout) {
  const double value = largest(inputs.v) * largest(dout) * static_cast<double>(inputs.v.size[3]);
  const double drop = inputs.terms.is_dropped ? 1 / (1 - inputs.terms.dropout_p) : 1;
  double most = 0;
  for (int64_t b = 0; b < outputs.p.size[0]; ++b) {
    for (int64_t n = 0; n < outputs.p.size[1]; ++n) {
      for (int64_t j = 0; j < outputs.p.size[3]; ++j) {
        double sum = 0;
        for (int64_t i = 0; i < outputs.p.size[2]; ++i) sum += outputs.p.at(b, n, i, j);
        most = std::max(most, sum);
      }
    }
  }
  const double share =
      std::max(1.0, most * static_cast<double>(inputs.q.size[1] / std::max<int64_t>(inputs.k.size[1], 1)));
  const double size = share * std::max(drop * value, largest(gradients.delta)) / 4;
  const double scale = std::abs(inputs.scale);
  return {size, size * scale * largest(inputs.k), size * scale * largest(inputs.q), drop * share * largest(dout) / 4};
}

struct Limits {
  double forward, gradient;
};
Limits limits_of(DType dtype) {
  switch (dtype) {
    case DType::kF64: return {1e-12, 1e-11};
    case DType::kBF16: return {0x1p-7, 0x1p-6};
    case DType::kF16: return {0x1p-10, 0x1p-9};
    default: return {1e-5, 5e-5};
  }
}

void expect_near(const char* name, const Array& got, const Array& want, double size, double limit) {
  ASSERT_EQ(got.size, want.size) << name;
  const double bound = limit * std::max(largest(want), size);
  for (std::size_t i = 0; i < got.data.size(); ++i) {
    if (std::isfinite(want.data[i])) {
      ASSERT_NEAR(got.data[i], want.data[i], bound) << name << " at " << i;
    } else {
      ASSERT_EQ(got.data[i], want.data[i]) << name << " at " << i;
    }
  }
}

Array dbias_of(const Draw& draw, const test::Gradients& gradients) {
  Array want(draw.in.bias.size);
  if (want.data.empty()) return want;
  test::for_each_index(gradients.ds.size, [&](int64_t b, int64_t n, int64_t i, int64_t j) {
    want.at(b % want.size[0], n % want.size[1], i % want.size[2], j) += gradients.ds.at(b, n, i, j);
  });
  return want;
}

void check_draw(uint64_t seed) {
  const Draw draw = make_draw(seed);
  std::ostringstream text;
  text << "RINGSPAN_DRAWS=1 RINGSPAN_SEED=" << seed << ": " << draw.problem.str() << ", world " << draw.q_map.world()
       << ", " << name_of(draw.schedule);
  SCOPED_TRACE(text.str());
  const MaskSpec mask(draw.problem.q_len, draw.problem.kv_len, draw.bands);
  const Plan plan = build_plan(draw.problem, mask, draw.q_map, draw.kv_map, draw.schedule, draw.route);
  const test::RingResults got = test::run_ring(plan, draw.in, {.padding = std::nan("")});
  const test::Inputs inputs = oracle_inputs(draw);
  const test::Outputs want = test::oracle_forward(inputs);
  const test::Gradients gradients = test::oracle_backward(inputs, want, draw.in.dout, draw.in.dlse);
  const Sizes sizes = sizes_of(inputs, want, gradients, draw.in.dout);
  const Limits limits = limits_of(draw.problem.dtype);
  const DType wide = accumulator_of(draw.problem.dtype);
  const double stats = wide == DType::kF64 ? 1e-12 : 1e-5;
  expect_near("out", got.out, want.out, largest(draw.in.v) / 4, limits.forward);
  expect_near("max", got.max, want.max, 1, stats);
  expect_near("sum", got.sum, want.sum, 1, stats);
  expect_near("lse", got.lse, want.lse, 1, stats);
  expect_near("dq", got.dq, gradients.dq, sizes.q, limits.gradient);
  expect_near("dk", got.dk, gradients.dk, sizes.k, limits.gradient);
  expect_near("dv", got.dv, gradients.dv, sizes.v, limits.gradient);
  const double rows = static_cast<double>(std::max<int64_t>(draw.problem.q_len, 1));
  expect_near("dbias", got.dbias, dbias_of(draw, gradients), sizes.score, limits.gradient);
  const auto heads = static_cast<int64_t>(gradients.dsink.size());
  expect_near("dsink", test::array_of({1, heads, 1, 1}, got.dsink), test::array_of({1, heads, 1, 1}, gradients.dsink),
              rows * sizes.score, limits.gradient);
}

int64_t number_from(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

TEST(RingProperty, RandomCallsMatchTheOracle) {
  const int64_t draws = number_from("RINGSPAN_DRAWS", 2000), first = number_from("RINGSPAN_SEED", 1);
  const std::vector<Isa> isas = available_isas();
  for (int64_t i = 0; i < draws; ++i) {
    force_isa(isas[static_cast<std::size_t>(i) % isas.size()]);
    check_draw(static_cast<uint64_t>(first + i));
    if (HasFatalFailure() || HasNonfatalFailure()) break;
  }
  force_isa(std::nullopt);
}

}  // namespace
}  // namespace ringspan
