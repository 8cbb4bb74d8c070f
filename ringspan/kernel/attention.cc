#include "ringspan/kernel/attention.h"

#include <algorithm>
#include <cmath>

#include "ringspan/base/error.h"
#include "ringspan/kernel/call_support.h"

namespace ringspan {
namespace {

constexpr double kFlopsOfExp = 40;  // what std::exp costs, counted as other work is

void check_view(const char* name, const ConstTensorView& view, std::array<int64_t, 4> size, DType dtype) {
  RINGSPAN_CHECK(view.size == size, name, " has size [", view.size[0], ", ", view.size[1], ", ", view.size[2], ", ",
                 view.size[3], "], expected [", size[0], ", ", size[1], ", ", size[2], ", ", size[3], "]");
  RINGSPAN_CHECK(view.dtype == dtype, name, " is ", name_of(view.dtype), ", expected ", name_of(dtype));
  check_made(name, view);
}

void check_inputs(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v, double scale) {
  RINGSPAN_CHECK(q.dim() >= 1 && q.dim() <= kMaxHeadDim, "q has head dim ", q.dim(), ", offered are 1 to ",
                 kMaxHeadDim);
  RINGSPAN_CHECK(v.dim() >= 1 && v.dim() <= kMaxHeadDim, "v has head dim ", v.dim(), ", offered are 1 to ",
                 kMaxHeadDim);
  RINGSPAN_CHECK(k.heads() >= 1 && q.heads() % k.heads() == 0, "q has ", q.heads(),
                 " heads, which is not a multiple of the ", k.heads(), " of k");
  check_view("q", q, q.size, q.dtype);
  check_view("k", k, {q.batch(), k.heads(), k.rows(), q.dim()}, q.dtype);
  check_view("v", v, {q.batch(), k.heads(), k.rows(), v.dim()}, q.dtype);
  const DType acc = accumulator_of(q.dtype);
  RINGSPAN_CHECK(is_finite_as(acc, scale), "scale is ", scale, ", which is not finite in ", name_of(acc));
}

std::array<int64_t, 4> stats_size(const ConstTensorView& q) { return {q.batch(), q.heads(), q.rows(), 1}; }
std::array<int64_t, 4> out_size(const ConstTensorView& q, const ConstTensorView& v) {
  return {q.batch(), q.heads(), q.rows(), v.dim()};
}

void check_forward(const ForwardArgs& args) {
  check_inputs(args.q, args.k, args.v, args.scale);
  kernel::check_pairs(args.pairs, args.q, args.tiles);
  const DType acc = accumulator_of(args.q.dtype);
  const bool state_is_absent = !args.state.acc.is_given() && args.begin && args.finish;
  if (!state_is_absent) {
    check_view("state.max", args.state.max, stats_size(args.q), acc);
    check_view("state.sum", args.state.sum, stats_size(args.q), acc);
    check_view("state.acc", args.state.acc, out_size(args.q, args.v), acc);
  }
  if (!args.finish) return;
  check_view("output.out", args.output.out, out_size(args.q, args.v), args.q.dtype);
  check_view("output.max", args.output.max, stats_size(args.q), acc);
  check_view("output.sum", args.output.sum, stats_size(args.q), acc);
  check_view("output.lse", args.output.lse, stats_size(args.q), acc);
  if (args.sink.is_given()) check_view("sink", args.sink, {1, args.q.heads(), 1, 1}, acc);
}

void check_backward(const BackwardArgs& args) {
  check_inputs(args.q, args.k, args.v, args.scale);
  kernel::check_pairs(args.pairs, args.q, args.tiles);
  const DType acc = accumulator_of(args.q.dtype);
  check_view("dout", args.dout, out_size(args.q, args.v), args.q.dtype);
  check_view("lse", args.lse, stats_size(args.q), acc);
  check_view("delta", args.delta, stats_size(args.q), acc);
  if (args.wants_dq) check_view("dq", args.dq, args.q.size, acc);
  if (args.wants_dkv) check_view("dk", args.dk, args.k.size, acc);
  if (args.wants_dkv) check_view("dv", args.dv, args.v.size, acc);
  if (!args.dbias.is_given()) return;
  RINGSPAN_CHECK(args.pairs.bias.is_given(), "dbias is given without a bias");
  check_view("dbias", args.dbias, args.pairs.bias.size, acc);
  RINGSPAN_CHECK(args.dbias.stride[3] != 0 || args.dbias.size[3] <= 1 || args.dbias.rows() == 0, "dbias shares its ",
                 args.dbias.size[3], " columns; give each its own");
}

}  // namespace

Isa attend(const ForwardArgs& args, Workspace& workspace, const Parallel& parallel) {
  check_forward(args);
  const Isa isa = current_isa();
  kernel::run_forward(args, {kernel::table_for(isa, args.q.dtype), workspace, parallel});
  return isa;
}

Isa attend_backward(const BackwardArgs& args, Workspace& workspace, const Parallel& parallel) {
  check_backward(args);
  const Isa isa = current_isa();
  kernel::run_backward(args, {kernel::table_for(isa, args.q.dtype), workspace, parallel});
  return isa;
}

void row_delta(const ConstTensorView& out, const ConstTensorView& dout, const ConstTensorView& dlse,
               const TensorView& delta, const Parallel& parallel) {
  const DType acc = accumulator_of(out.dtype);
  RINGSPAN_CHECK(out.dim() >= 1 && out.dim() <= kMaxHeadDim, "out has head dim ", out.dim(), ", offered are 1 to ",
                 kMaxHeadDim);
  check_view("dout", dout, out.size, out.dtype);
  check_view("delta", delta, stats_size(out), acc);
  if (dlse.is_given()) check_view("dlse", dlse, stats_size(out), acc);
  constexpr int64_t kRowsPerJob = 256;
  const int64_t blocks = kernel::divide_up(out.rows(), kRowsPerJob);
  const kernel::KernelTable& table = kernel::table_for(current_isa(), acc);
  const kernel::RowDelta args{kernel::raw_view(out), kernel::raw_view(dout), kernel::raw_view(dlse),
                              kernel::raw_view(delta)};
  const int workers = kernel::count_workers(parallel, 0, static_cast<double>(out.num_elements()));
  kernel::run_jobs(parallel, workers, out.batch() * out.heads() * blocks, nullptr, 0, [&](int64_t i, unsigned char*) {
    const int64_t begin = i % blocks * kRowsPerJob;
    const int64_t head = i / blocks % out.heads();
    table.row_delta(args, i / blocks / out.heads(), head, begin, std::min(begin + kRowsPerJob, out.rows()));
  });
}

void sink_gradient(const ConstTensorView& sink, const ConstTensorView& lse, const ConstTensorView& delta,
                   const TensorView& dsink, const Parallel& parallel) {
  check_view("sink", sink, {1, lse.heads(), 1, 1}, lse.dtype);
  check_view("delta", delta, lse.size, lse.dtype);
  check_view("dsink", dsink, sink.size, lse.dtype);
  // One head is summed by one thread, in one order: the same bits for any number of threads.
  const int workers = kernel::count_workers(parallel, 0, static_cast<double>(lse.num_elements()) * kFlopsOfExp);
  kernel::run_jobs(parallel, workers, lse.heads(), nullptr, 0, [&](int64_t head, unsigned char*) {
    const double own = load_as_double(sink.row(0, head, 0), sink.dtype, 0);
    double sum = 0;
    for (int64_t b = 0; b < lse.batch(); ++b) {
      for (int64_t s = 0; s < lse.rows(); ++s) {
        const double total = load_as_double(lse.row(b, head, s), lse.dtype, 0);
        if (std::isinf(total) && total < 0) continue;
        sum += std::exp(own - total) * load_as_double(delta.row(b, head, s), delta.dtype, 0);
      }
    }
    store_from_double(dsink.row(0, head, 0), dsink.dtype, 0, -sum);
  });
}

}  // namespace ringspan
