// Random calls on in-process ranks against the oracle: problem, mask of up to 8 bands, maps with shards that are empty,
// hold one row or padding only, or differ from batch entry to entry, world 1 to 6, layout, dtype, grouped heads, and
// everything that changes single pairs, forward and all gradients.
//
//   RINGSPAN_DRAWS=5000 RINGSPAN_SEED=15001 ringspan_tests --gtest_filter='RingProperty.*'   seeds 15001 to 20000
//   RINGSPAN_DRAWS=1 RINGSPAN_SEED=1234                                                      the one that failed
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <sstream>

#include <gtest/gtest.h>

#include "ringspan/kernel/isa.h"
#include "ringspan/ring/ring_attention.h"

#include "tests/ringspan/support/ring_cases.h"
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
  int threads = 1;
};

Problem draw_problem(Source& source) {
  Problem p;
  p.batch = source.in(1, 2);
  p.kv_heads = source.in(1, 3);
  p.q_heads = p.kv_heads * source.in(1, 3);
  // Some are longer than a block of a kernel, some have so many keys for few queries that these are cut into parts.
  const bool is_long = source.chance(2), is_wide = source.chance(2);
  if (is_long || is_wide) p.q_heads = p.kv_heads = p.batch = 1;
  const auto length = [&] { return source.chance(5) ? 0 : source.in(1, is_long ? 280 : source.chance(10) ? 6 : 44); };
  p.q_len = length();
  p.kv_len = source.chance(60) ? p.q_len : length();
  if (is_wide) {
    p.q_len = source.of({1, 2, 3, 40});
    p.kv_len = source.in(500, 1300);
  }
  p.qk_dim = source.in(1, source.chance(3) ? 150 : 20);
  p.v_dim = source.in(1, source.chance(3) ? 150 : 20);
  p.dtype = source.of({DType::kF32, DType::kF32, DType::kF64, DType::kBF16, DType::kF16});
  p.layout = source.of({Layout::kBNSD, Layout::kBSND, Layout::kBSH, Layout::kSBH, Layout::kTND});
  if (p.layout == Layout::kTND) p.batch = 1;
  p.scale = source.chance(70) ? default_scale(p.qk_dim) : source.chance(15) ? 0 : source.real() - 0.5;
  return p;
}

// Documents that number their pairs in their own way: none, or one to three.
std::vector<PairGrid> draw_grids(Source& source, const Problem& p) {
  std::vector<PairGrid> grids;
  if (!source.chance(15)) return grids;
  const int64_t count = source.in(1, 3);
  for (int64_t i = 0; i < count; ++i) {
    const auto stride = [&] { return static_cast<uint64_t>(source.in(0, 1 << 20)); };
    grids.push_back({p.q_len * i / count, p.kv_len * i / count, source.word(), stride(), stride(), stride()});
  }
  return grids;
}

// A row of a grid keeps pairs of its own grid only.
std::vector<Band> draw_bands(Source& source, const Problem& p, const std::vector<PairGrid>& grids) {
  std::vector<Band> bands;
  for (int64_t count = source.chance(20) ? 0 : source.in(1, 8); count > 0; --count) {
    const auto range = [&](int64_t first, int64_t end) {
      const int64_t a = source.in(first, end), b = source.in(first, end);
      return source.chance(30) ? std::pair(first, end) : std::pair(std::min(a, b), std::max(a, b));
    };
    const int64_t grid = grids.empty() ? 0 : source.in(0, std::ssize(grids) - 1);
    const bool is_last = grid + 1 >= std::ssize(grids);
    const auto [q_begin, q_end] =
        range(grids.empty() ? 0 : grids[grid].q_begin, is_last ? p.q_len : grids[grid + 1].q_begin);
    const auto [kv_begin, kv_end] =
        range(grids.empty() ? 0 : grids[grid].kv_begin, is_last ? p.kv_len : grids[grid + 1].kv_begin);
    const int64_t lo = source.chance(30) ? -kNoDiagonal : source.in(-50, 50);
    const int64_t hi = source.chance(30) ? kNoDiagonal : source.in(-50, 50);
    bands.push_back({q_begin, q_end, kv_begin, kv_end, std::min(lo, hi), std::max(lo, hi)});
  }
  return bands;
}

// Ranks that hold rows: all, some or one.
std::vector<int64_t> draw_holders(Source& source, int64_t world) {
  std::vector<int64_t> holders(world);
  std::iota(holders.begin(), holders.end(), 0);
  if (source.chance(50)) return holders;
  std::shuffle(holders.begin(), holders.end(), source.engine());
  holders.resize(source.in(1, world));
  return holders;
}

ShardMap draw_lengths(Source& source, int64_t length, int64_t world) {
  const std::vector<int64_t> holders = draw_holders(source, world);
  std::vector<int64_t> lengths(world, 0);
  // One row each first, so that some shards have no other.
  const bool has_singles = source.chance(30);
  for (int64_t i = 0; i < length; ++i) {
    const int64_t most = std::ssize(holders) - 1;
    ++lengths[holders[has_singles ? std::min(i, most) : source.in(0, most)]];
  }
  return ShardMap::from_lengths(lengths);
}

// Positions in any order, with padding rows between and behind them, the same for all batch entries or others for each.
// A rank may hold padding only.
ShardMap draw_segments(Source& source, int64_t length, int64_t world, int64_t lists) {
  std::vector<std::vector<std::vector<Segment>>> segments(lists);
  std::vector<int64_t> rows(world, 0);
  for (std::vector<std::vector<Segment>>& list : segments) {
    const std::vector<int64_t> holders = draw_holders(source, world);
    std::vector<int64_t> order(length), used(world, 0);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), source.engine());
    list.resize(world);
    for (const int64_t position : order) {
      const int64_t rank = source.of(holders);
      used[rank] += source.chance(10) ? 1 : 0;
      list[rank].push_back({used[rank]++, position, 1, 1});
    }
    for (int64_t rank = 0; rank < world; ++rank) rows[rank] = std::max(rows[rank], used[rank]);
  }
  for (int64_t& count : rows) count += source.chance(20) ? source.in(1, 3) : 0;
  return ShardMap::from_segments(length, segments, rows);
}

ShardMap draw_map(Source& source, int64_t length, int64_t world, int64_t batch, const MaskSpec& mask) {
  switch (source.in(0, 6)) {
    case 0: return ShardMap::contiguous(length, world);
    case 1: return ShardMap::head_tail(length, world);
    case 2: return ShardMap::striped(length, world);
    case 3: return draw_lengths(source, length, world);
    case 4:
      // A map by work needs a square mask.
      if (mask.q_len() == mask.kv_len() && mask.q_len() == length) return ShardMap::balanced(mask, world);
      return ShardMap::striped(length, world);
    default: return draw_segments(source, length, world, source.chance(50) ? 1 : batch);
  }
}

// [B or 1, N or 1, Sq or 1, Skv]. Where entries have maps of their own, what is split by rows differs from entry to
// entry.
std::array<int64_t, 4> draw_pair_size(Source& source, const Draw& draw) {
  const Problem& p = draw.problem;
  const auto share = [&](int64_t size) { return source.chance(40) ? int64_t{1} : size; };
  std::array<int64_t, 4> size{share(p.batch), share(p.q_heads), share(p.q_len), p.kv_len};
  if (size[2] == p.q_len && draw.q_map.num_lists() > 1) size[0] = p.batch;
  return size;
}

void draw_bias(Source& source, Draw& draw) {
  const Problem& p = draw.problem;
  if (source.chance(30)) {
    draw.in.bias_dtype = p.dtype == DType::kF64 ? DType::kF32 : source.of({DType::kF32, DType::kBF16, DType::kF16});
  }
  draw.in.wants_dbias = source.chance(85);
  draw.in.bias = test::random_array(source.word(), draw_pair_size(source, draw), draw.in.bias_dtype.value_or(p.dtype));
  for (double& value : draw.in.bias.data) value = source.chance(10) ? -kInfinity : value;
  if (source.chance(30)) draw.in.bias_factor = source.of({0.5, -1.25, 0.0});
}

void draw_mask(Source& source, Draw& draw) {
  draw.in.mask = Array(draw_pair_size(source, draw));
  for (double& value : draw.in.mask.data) value = source.chance(70);
  draw.in.mask_marks_masked = source.chance(50);
  // Rows of a grid are its own, not those of a rank.
  draw.in.mask_by_grid = draw.in.mask.size[2] == draw.problem.q_len && source.chance(20);
}

void draw_slopes(Source& source, Draw& draw) {
  const Problem& p = draw.problem;
  draw.in.slopes = test::random_array(source.word(), {source.chance(50) ? 1 : p.batch, p.q_heads, 1, 1}, DType::kF32);
  // Small, as slopes are: scores of hundreds lose digits of their own (docs/maths.md).
  for (double& slope : draw.in.slopes.data) slope = test::rounded(0.05 * slope, DType::kF32);
  draw.in.slope_shift = source.chance(50) ? 0 : source.in(-5, 5);
  draw.in.slope_of_root = source.chance(30);
}

void draw_pairs(Source& source, Draw& draw) {
  const Problem& p = draw.problem;
  draw.in.splits_one_row = source.chance(50);
  if (source.chance(30)) {
    draw.in.pair_order = source.of<std::array<int, 4>>({{0, 2, 1, 3}, {2, 0, 1, 3}, {0, 1, 3, 2}});
    draw.in.pair_gap = source.in(1, 2);
  }
  if (source.chance(35)) draw_bias(source, draw);
  if (source.chance(30)) draw_mask(source, draw);
  if (source.chance(25)) draw_slopes(source, draw);
  if (source.chance(30)) {
    for (int64_t n = 0; n < p.q_heads; ++n) {
      draw.in.sink.push_back(test::rounded(source.chance(10) ? -kInfinity : 6 * source.real() - 3, DType::kF32));
    }
  }
  if (source.chance(25)) draw.in.softcap = source.of({0.75, 2.0, 30.0});
  if (source.chance(30)) draw.in.dropout = {source.of({0.1, 0.5, 0.9}), source.word(), source.word()};
}

// NaN in keys, values and queries of which no pair is kept must not be seen.
void poison_unkept(Draw& draw) {
  const Problem& p = draw.problem;
  const test::Inputs inputs = test::oracle_inputs(p, draw.in, draw.keep);
  std::vector<bool> q_kept(draw.in.q.data.size() / p.qk_dim), kv_kept(draw.in.k.data.size() / p.qk_dim);
  const auto q_row = [&](int64_t b, int64_t n, int64_t i) { return (b * p.q_heads + n) * p.q_len + i; };
  const auto kv_row = [&](int64_t b, int64_t n, int64_t j) { return (b * p.kv_heads + n) * p.kv_len + j; };
  test::for_each_index({p.batch, p.q_heads, p.q_len, p.kv_len}, [&](int64_t b, int64_t n, int64_t i, int64_t j) {
    const bool is_kept = draw.keep(b, i, j) && !(inputs.terms.bias && inputs.terms.bias(b, n, i, j) == -kInfinity);
    if (is_kept) q_kept[q_row(b, n, i)] = kv_kept[kv_row(b, n / p.heads_per_kv(), j)] = true;
  });
  const auto poison = [](Array& array, const std::vector<bool>& kept, int64_t dim) {
    for (std::size_t i = 0; i < array.data.size(); ++i) {
      if (!kept[i / static_cast<std::size_t>(dim)]) array.data[i] = std::nan("");
    }
  };
  poison(draw.in.q, q_kept, p.qk_dim);
  poison(draw.in.k, kv_kept, p.qk_dim);
  poison(draw.in.v, kv_kept, p.v_dim);
}

Draw make_draw(uint64_t seed) {
  Source source(seed);
  Draw draw{.problem = draw_problem(source)};
  const Problem& p = draw.problem;
  const std::vector<PairGrid> grids = draw_grids(source, p);
  const int64_t lists = source.chance(50) ? 1 : p.batch;
  for (int64_t b = 0; b < lists; ++b) draw.bands.push_back(draw_bands(source, p, grids));
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
  draw.q_map = draw_map(source, p.q_len, world, p.batch, mask);
  draw.kv_map =
      p.q_len == p.kv_len && source.chance(50) ? draw.q_map : draw_map(source, p.kv_len, world, p.batch, mask);
  draw.route = source.of({GradRoute::kFromOwner, GradRoute::kFromNext});
  draw.in = test::random_inputs(source.word() >> 8, p);
  if (source.chance(50)) {
    draw.in.dlse = test::random_array(source.word(), {p.batch, p.q_heads, p.q_len, 1}, accumulator_of(p.dtype));
  }
  draw.in.grids = grids;
  if (source.chance(10)) {
    draw.in.dout_is_one_value = true;
    std::fill(draw.in.dout.data.begin(), draw.in.dout.data.end(), 0.75);
  }
  draw_pairs(source, draw);
  draw.schedule = source.of(schedules_for(world));
  // A plan need not know of rows that stay where they are.
  if (moves_queries(draw.schedule) || source.chance(60)) test::describe_row_tensors(draw.in, draw.problem);
  if (source.chance(25)) poison_unkept(draw);
  draw.threads = static_cast<int>(source.chance(15) ? source.in(2, 3) : 1);
  return draw;
}

std::string terms_of(const RingInputs& in) {
  std::ostringstream text;
  for (const auto& [name, array] : {std::pair("bias", &in.bias), {"mask", &in.mask}, {"slopes", &in.slopes}}) {
    if (!array->is_given()) continue;
    text << ", " << name << " [" << array->size[0] << ", " << array->size[1] << ", " << array->size[2] << ", "
         << array->size[3] << "]";
  }
  text << (in.mask_by_grid ? " by grid" : "") << (in.sink.empty() ? "" : ", sink")
       << (in.dlse.is_given() ? ", dlse" : "") << ", bias_factor " << in.bias_factor << ", softcap " << in.softcap
       << ", dropout " << in.dropout.p << ", " << in.grids.size() << " grids" << (in.wants_dbias ? "" : ", no dbias");
  return text.str();
}

void check_draw(uint64_t seed) {
  const Draw draw = make_draw(seed);
  std::ostringstream text;
  text << "RINGSPAN_DRAWS=1 RINGSPAN_SEED=" << seed << ": " << draw.problem.str() << ", world " << draw.q_map.world()
       << ", " << name_of(draw.schedule) << ", " << name_of(current_isa()) << ", queries " << draw.q_map.str()
       << ", keys " << draw.kv_map.str() << terms_of(draw.in);
  SCOPED_TRACE(text.str());
  const MaskSpec mask(draw.problem.q_len, draw.problem.kv_len, draw.bands);
  const Plan plan = build_plan(draw.problem, mask, draw.q_map, draw.kv_map, draw.schedule, draw.route);
  try {
    const test::RingResults got = test::run_ring(plan, draw.in, {.padding = std::nan(""), .threads = draw.threads});
    test::expect_exact(draw.problem, draw.in, draw.keep, got);
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

int64_t number_from(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

TEST(RingProperty, RandomCallsMatchTheOracle) {
  const int64_t draws = number_from("RINGSPAN_DRAWS", 2000), first = number_from("RINGSPAN_SEED", 1);
  const std::vector<Isa> isas = available_isas();
  for (int64_t seed = first; seed < first + draws; ++seed) {
    force_isa(isas[static_cast<std::size_t>(seed) % isas.size()]);
    check_draw(static_cast<uint64_t>(seed));
    if (HasFatalFailure() || HasNonfatalFailure()) break;
  }
  force_isa(std::nullopt);
}

}  // namespace
}  // namespace ringspan
