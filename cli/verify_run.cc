#include "cli/verify_run.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "ringspan/plan/validate.h"
#include "ringspan/ring/ring_attention.h"
#include "ringspan/transport/inproc/inproc.h"

namespace ringspan::cli {
namespace {

// A dense tensor [batch, heads, rows, dim] in the problem's layout.
class Dense {
 public:
  Dense() = default;
  Dense(DType dtype, Layout layout, std::array<int64_t, 4> size)
      : bytes_(static_cast<size_t>(size[0] * size[1] * size[2] * size[3] * size_of(dtype))),
        view_(view_of(static_cast<void*>(bytes_.data()), dtype, layout, size)) {}
  Dense(Dense&&) = default;
  Dense& operator=(Dense&&) = default;

  const TensorView& view() const { return view_; }

 private:
  std::vector<std::byte> bytes_;
  TensorView view_;
};

struct Inputs {
  Dense q, k, v, dout;
};

struct Results {
  Dense out, max, sum, lse, dq, dk, dv;
  OutputView output() const { return {out.view(), max.view(), sum.view(), lse.view()}; }
};

Dense random_tensor(std::mt19937_64& generator, DType dtype, Layout layout, std::array<int64_t, 4> size) {
  Dense dense(dtype, layout, size);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < dense.view().num_elements(); ++i) {
    store_from_double(dense.view().data, dtype, i, normal(generator));
  }
  return dense;
}

Results results_for(const Problem& p, DType dtype, int64_t q_rows, int64_t kv_rows) {
  const DType stats = accumulator_of(dtype);
  return {Dense(dtype, p.layout, {p.batch, p.q_heads, q_rows, p.v_dim}),
          Dense(stats, p.layout, {p.batch, p.q_heads, q_rows, 1}),
          Dense(stats, p.layout, {p.batch, p.q_heads, q_rows, 1}),
          Dense(stats, p.layout, {p.batch, p.q_heads, q_rows, 1}),
          Dense(dtype, p.layout, {p.batch, p.q_heads, q_rows, p.qk_dim}),
          Dense(dtype, p.layout, {p.batch, p.kv_heads, kv_rows, p.qk_dim}),
          Dense(dtype, p.layout, {p.batch, p.kv_heads, kv_rows, p.v_dim})};
}

// Copies rows between a global tensor and a rank's, by the map; padding rows stay as they are.
enum class Direction { kToRank, kToGlobal };
void move_rows(const Dense& global, const Dense& local, const ShardMap& map, int64_t rank, Direction direction) {
  for (int64_t b = 0; b < global.view().batch(); ++b) {
    const std::vector<int64_t> positions = map.positions(rank, b);
    for (size_t row = 0; row < positions.size(); ++row) {
      if (positions[row] < 0) continue;
      const auto one_row = [&](const TensorView& view, int64_t s) {
        return TensorView{view.row(b, 0, s), view.dtype, {1, view.heads(), 1, view.dim()}, view.stride};
      };
      const TensorView there = one_row(global.view(), positions[row]);
      const TensorView here = one_row(local.view(), static_cast<int64_t>(row));
      direction == Direction::kToRank ? copy(there, here) : copy(here, there);
    }
  }
}

void run_rank(const Plan& plan, Transport& transport, const Inputs& in, const Results& global, int threads,
              Verification& verification) {
  const Problem& p = plan.problem();
  const int64_t rank = transport.rank();
  const int64_t q_rows = plan.q_map().local_rows(rank), kv_rows = plan.kv_map().local_rows(rank);
  const Inputs local{Dense(p.dtype, p.layout, {p.batch, p.q_heads, q_rows, p.qk_dim}),
                     Dense(p.dtype, p.layout, {p.batch, p.kv_heads, kv_rows, p.qk_dim}),
                     Dense(p.dtype, p.layout, {p.batch, p.kv_heads, kv_rows, p.v_dim}),
                     Dense(p.dtype, p.layout, {p.batch, p.q_heads, q_rows, p.v_dim})};
  move_rows(in.q, local.q, plan.q_map(), rank, Direction::kToRank);
  move_rows(in.k, local.k, plan.kv_map(), rank, Direction::kToRank);
  move_rows(in.v, local.v, plan.kv_map(), rank, Direction::kToRank);
  move_rows(in.dout, local.dout, plan.q_map(), rank, Direction::kToRank);
  const Results results = results_for(p, p.dtype, q_rows, kv_rows);
  const RankPlan part = plan.rank(rank);
  const ThreadPool pool(threads);
  ring_forward(part, transport, local.q.view(), local.k.view(), local.v.view(), results.output(), pool);
  ring_backward(part, transport, local.q.view(), local.k.view(), local.v.view(), results.output(), local.dout.view(),
                {results.dq.view(), results.dk.view(), results.dv.view()}, pool);
  const SentBytes planned = sent_bytes(part);
  verification.planned_bytes[rank] = planned.forward + planned.backward;
  verification.sent_bytes[rank] = transport.counters().bytes_sent;
  move_rows(global.out, results.out, plan.q_map(), rank, Direction::kToGlobal);
  move_rows(global.lse, results.lse, plan.q_map(), rank, Direction::kToGlobal);
  move_rows(global.dq, results.dq, plan.q_map(), rank, Direction::kToGlobal);
  move_rows(global.dk, results.dk, plan.kv_map(), rank, Direction::kToGlobal);
  move_rows(global.dv, results.dv, plan.kv_map(), rank, Direction::kToGlobal);
}

Dense as_double(const Dense& from, Layout layout) {
  Dense to(DType::kF64, layout, from.view().size);
  copy(from.view(), to.view());
  return to;
}

// The whole problem on one rank: same values, same mask, double throughout, one pair at a time.
Results reference(const Plan& plan, const Inputs& in) {
  Problem p = plan.problem();
  p.dtype = DType::kF64;
  const Plan whole =
      build_plan(p, plan.mask(), ShardMap::contiguous(p.q_len, 1), ShardMap::contiguous(p.kv_len, 1), Schedule::kRing);
  const RankPlan part = whole.rank(0);
  const std::vector<Tile>& tiles = part.forward.front().tiles;
  const Dense q = as_double(in.q, p.layout), k = as_double(in.k, p.layout), v = as_double(in.v, p.layout);
  const Dense dout = as_double(in.dout, p.layout);
  Results results = results_for(p, DType::kF64, p.q_len, p.kv_len);
  ForwardArgs forward{q.view(), k.view(), v.view(), tiles, p.scale, {}, true, true, results.output()};
  attend_reference(forward);
  const Dense delta(DType::kF64, p.layout, results.lse.view().size);
  row_delta(results.out.view(), dout.view(), {}, delta.view(), Serial());
  BackwardArgs backward;
  backward.q = q.view();
  backward.k = k.view();
  backward.v = v.view();
  backward.dout = dout.view();
  backward.lse = results.lse.view();
  backward.delta = delta.view();
  backward.tiles = tiles;
  backward.scale = p.scale;
  backward.dq = results.dq.view();
  backward.dk = results.dk.view();
  backward.dv = results.dv.view();
  attend_backward_reference(backward);
  return results;
}

// Largest difference over the largest reference value. Infinite values must agree and count no further.
double relative_error(const Dense& got, const Dense& want) {
  double difference = 0, largest = 0;
  for (int64_t i = 0; i < want.view().num_elements(); ++i) {
    const double a = load_as_double(got.view().data, got.view().dtype, i);
    const double b = load_as_double(want.view().data, want.view().dtype, i);
    if (a == b && std::isinf(b)) continue;
    if (!std::isfinite(a - b)) return std::numeric_limits<double>::infinity();
    difference = std::max(difference, std::fabs(a - b));
    largest = std::max(largest, std::fabs(b));
  }
  return difference == 0 ? 0 : difference / largest;
}

// fp32: the project's bounds. 16-bit: a few units of the dtype's rounding (2^-9 and 2^-12 relative), which enters in
// the output, in the rounded weights and in the gradients of the scores.
double bound_of(DType dtype, bool gradient) {
  switch (dtype) {
    case DType::kF64: return 1e-12;
    case DType::kF32: return gradient ? 5e-5 : 1e-5;
    case DType::kBF16: return gradient ? 0x1p-6 : 0x1p-7;
    case DType::kF16: return gradient ? 0x1p-9 : 0x1p-10;
    case DType::kByte: break;
  }
  return 0;
}

}  // namespace

bool Verification::met() const {
  return plan_faults.empty() && sent_bytes == planned_bytes &&
         std::all_of(comparisons.begin(), comparisons.end(), [](const Comparison& c) { return c.met(); });
}

Verification verify(const Plan& plan, uint64_t seed, int threads_per_rank) {
  const Problem& p = plan.problem();
  std::mt19937_64 generator(seed);
  const Inputs in{random_tensor(generator, p.dtype, p.layout, {p.batch, p.q_heads, p.q_len, p.qk_dim}),
                  random_tensor(generator, p.dtype, p.layout, {p.batch, p.kv_heads, p.kv_len, p.qk_dim}),
                  random_tensor(generator, p.dtype, p.layout, {p.batch, p.kv_heads, p.kv_len, p.v_dim}),
                  random_tensor(generator, p.dtype, p.layout, {p.batch, p.q_heads, p.q_len, p.v_dim})};
  Verification verification;
  verification.isa = current_isa();
  verification.plan_faults = validate(plan, plan.mask());
  verification.sent_bytes.resize(plan.world());
  verification.planned_bytes.resize(plan.world());
  const Results got = results_for(p, p.dtype, p.q_len, p.kv_len);
  inproc::run_ranks(plan.world(),
                    [&](Transport& transport) { run_rank(plan, transport, in, got, threads_per_rank, verification); });
  const Results want = reference(plan, in);
  const double forward = bound_of(p.dtype, false), gradient = bound_of(p.dtype, true);
  // lse is kept in the accumulator type whatever the dtype of the inputs.
  const double statistics = bound_of(accumulator_of(p.dtype), false);
  verification.comparisons = {{"out", relative_error(got.out, want.out), forward},
                              {"lse", relative_error(got.lse, want.lse), statistics},
                              {"dq", relative_error(got.dq, want.dq), gradient},
                              {"dk", relative_error(got.dk, want.dk), gradient},
                              {"dv", relative_error(got.dv, want.dv), gradient}};
  return verification;
}

}  // namespace ringspan::cli
