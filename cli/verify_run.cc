#include "cli/verify_run.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "ringspan/plan/validate.h"
#include "ringspan/ring/ring_attention.h"
#include "ringspan/transport/inproc/inproc.h"

namespace ringspan::cli {
namespace {

// Infinite values count no further.
double largest_of(const Dense& tensor) {
  double largest = 0;
  const TensorView& view = tensor.view();
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    const double value = std::fabs(load_as_double(view.data, view.dtype, i));
    if (std::isfinite(value)) largest = std::max(largest, value);
  }
  return largest;
}

// `delta` is scratch afterwards.
GradientScales scales_of(const Problem& p, const Inputs& in, const Extras& extras, const Results& want,
                         const Dense& delta) {
  const double cancelled = largest_of(delta) / 2;
  GradientScales scales{.dq = cancelled * std::fabs(p.scale) * largest_of(in.k),
                        .dk = cancelled * std::fabs(p.scale) * largest_of(in.q),
                        .dbias = cancelled};
  if (!want.dsink.is_given()) return scales;
  const TensorView& view = delta.view();
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    store_from_double(view.data, view.dtype, i, std::fabs(load_as_double(view.data, view.dtype, i)));
  }
  const Dense sum(DType::kF64, Layout::kBNSD, want.dsink.view().size);
  sink_gradient(extras.sink, want.lse.view(), view, sum.view(), Serial());
  scales.dsink = largest_of(sum);
  return scales;
}

// The whole call on one rank: same values, same mask, double throughout, one pair at a time.
Results reference(Problem p, const MaskSpec& mask, const Terms& terms, const Inputs& given, uint64_t seed,
                  GradientScales& scales) {
  p.dtype = DType::kF64;
  const Plan whole =
      build_plan(p, mask, ShardMap::contiguous(p.q_len, 1), ShardMap::contiguous(p.kv_len, 1), Schedule::kRing);
  const RankPlan part = whole.rank(0);
  const std::vector<Tile>& tiles = part.forward.front().tiles;
  const Inputs in = in_double(p, given);
  Results results = results_for(p, terms, p.dtype, p.q_len, p.kv_len);
  PairGrid grid;
  const Extras extras = extras_of(p, terms, in, seed, grid);
  ForwardArgs forward;
  forward.q = in.q.view();
  forward.k = in.k.view();
  forward.v = in.v.view();
  forward.tiles = tiles;
  forward.scale = p.scale;
  forward.output = results.output();
  forward.sink = extras.sink;
  forward.pairs = extras.pairs;
  attend_reference(forward);
  const Dense delta(DType::kF64, p.layout, results.lse.view().size);
  row_delta(results.out.view(), in.dout.view(), in.dlse.view(), delta.view(), Serial());
  if (terms.sink) sink_gradient(extras.sink, results.lse.view(), delta.view(), results.dsink.view(), Serial());
  BackwardArgs backward;
  backward.q = in.q.view();
  backward.k = in.k.view();
  backward.v = in.v.view();
  backward.dout = in.dout.view();
  backward.lse = results.lse.view();
  backward.delta = delta.view();
  backward.tiles = tiles;
  backward.scale = p.scale;
  backward.dq = results.dq.view();
  backward.dk = results.dk.view();
  backward.dv = results.dv.view();
  backward.pairs = extras.pairs;
  backward.dbias = dbias_view(p, results);
  attend_backward_reference(backward);
  scales = scales_of(p, in, extras, results, delta);
  return results;
}

// Largest difference over the largest reference value, or over `scale` where that is more. Infinite values must agree.
double relative_error(const Dense& got, const Dense& want, double scale = 0) {
  double difference = 0;
  for (int64_t i = 0; i < want.view().num_elements(); ++i) {
    const double a = load_as_double(got.view().data, got.view().dtype, i);
    const double b = load_as_double(want.view().data, want.view().dtype, i);
    if (a == b && std::isinf(b)) continue;
    if (!std::isfinite(a - b)) return std::numeric_limits<double>::infinity();
    difference = std::max(difference, std::fabs(a - b));
  }
  return difference == 0 ? 0 : difference / std::max(scale, largest_of(want));
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

Verifier::Verifier(const Problem& problem, const MaskSpec& mask, const Terms& terms, uint64_t seed)
    : problem_(problem),
      mask_(mask),
      terms_(terms),
      seed_(seed),
      inputs_(random_inputs(problem, terms, seed)),
      want_(reference(problem, mask, terms, inputs_, seed, scales_)) {}

Verification Verifier::run(const Plan& plan, int threads_per_rank) const {
  Verification verification;
  verification.plan_faults = validate(plan, mask_);
  verification.sent_bytes.resize(plan.world());
  verification.planned_bytes.resize(plan.world());
  std::vector<Results> local(plan.world());
  inproc::run_ranks(plan.world(), [&](Transport& transport) {
    local[transport.rank()] = run_rank(plan, transport, threads_per_rank, verification);
  });
  const Results got = results_for(problem_, terms_, problem_.dtype, problem_.q_len, problem_.kv_len);
  for (int64_t rank = 0; rank < plan.world(); ++rank) {
    put_back(local[rank], terms_, plan.q_map(), plan.kv_map(), rank, got);
    // What ranks share has a part on each.
    if (terms_.bias == Terms::Bias::kShared) add(local[rank].dbias.view(), got.dbias.view());
    if (terms_.sink) add(local[rank].dsink.view(), got.dsink.view());
  }
  verification.comparisons = compare(got);
  return verification;
}

Results Verifier::run_rank(const Plan& plan, Transport& transport, int threads, Verification& verification) const {
  const int64_t rank = transport.rank();
  const Inputs in = inputs_of_rank(problem_, inputs_, plan.q_map(), plan.kv_map(), rank);
  Results results =
      results_for(problem_, terms_, problem_.dtype, plan.q_map().local_rows(rank), plan.kv_map().local_rows(rank));
  PairGrid grid;
  const Extras extras = extras_of(problem_, terms_, in, seed_, grid);
  const RankPlan part = plan.rank(rank);
  const ThreadPool pool(threads);
  const InputsView inputs{in.q.view(), in.k.view(), in.v.view()};
  ring_forward(part, transport, inputs, results.output(), {&pool, extras});
  const GradsView grads{.dq = results.dq.view(),
                        .dk = results.dk.view(),
                        .dv = results.dv.view(),
                        .dsink = results.dsink.view(),
                        .dbias = dbias_view(problem_, results)};
  ring_backward(part, transport, {inputs, results.output(), in.dout.view(), in.dlse.view()}, grads, {&pool, extras});
  const SentBytes planned = sent_bytes(part);
  verification.planned_bytes[rank] = planned.forward + planned.backward;
  verification.sent_bytes[rank] = transport.counters().bytes_sent;
  return results;
}

std::vector<Comparison> Verifier::compare(const Results& got) const {
  const double forward = bound_of(problem_.dtype, false), gradient = bound_of(problem_.dtype, true);
  // lse is kept in the accumulator type whatever the dtype of the inputs.
  const double statistics = bound_of(accumulator_of(problem_.dtype), false);
  std::vector<Comparison> comparisons = {{"out", relative_error(got.out, want_.out), forward},
                                         {"lse", relative_error(got.lse, want_.lse), statistics},
                                         {"dq", relative_error(got.dq, want_.dq, scales_.dq), gradient},
                                         {"dk", relative_error(got.dk, want_.dk, scales_.dk), gradient},
                                         {"dv", relative_error(got.dv, want_.dv), gradient}};
  if (got.dbias.is_given())
    comparisons.push_back({"dbias", relative_error(got.dbias, want_.dbias, scales_.dbias), gradient});
  if (got.dsink.is_given())
    comparisons.push_back({"dsink", relative_error(got.dsink, want_.dsink, scales_.dsink), gradient});
  return comparisons;
}

}  // namespace ringspan::cli
