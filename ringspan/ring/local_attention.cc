#include "ringspan/ring/local_attention.h"

#include <limits>

namespace ringspan {

LocalForward::LocalForward(const RankPlan& part, const ConstTensorView& q, const OutputView& output,
                           const Extras& extras, const Parallel& parallel)
    : part_(part), q_(q), output_(output), extras_(extras), parallel_(parallel) {}

void LocalForward::attend(std::span<const Tile> tiles, const ConstTensorView& k, const ConstTensorView& v, bool begins,
                          bool finishes) {
  // A call of one step needs no state between steps.
  if (begins && !finishes) state_ = {output_.max, output_.sum, accumulator_for(output_.out, acc_)};
  ForwardArgs args;
  args.q = q_;
  args.k = k;
  args.v = v;
  args.tiles = tiles;
  args.scale = part_.problem.scale;
  args.state = state_;
  args.begin = begins;
  args.finish = finishes;
  args.output = output_;
  args.sink = extras_.sink;
  args.pairs = extras_.pairs;
  const WorkspacePool::Lease workspace = WorkspacePool::process().take();
  ringspan::attend(args, *workspace, parallel_);
  if (finishes && extras_.sink.data) empty_padding();
}

// The kernel gives the sink to every row. One that holds no position is no row of the sequence: it stays empty, and so
// adds nothing to the sink's gradient either.
void LocalForward::empty_padding() const {
  constexpr double kEmpty = -std::numeric_limits<double>::infinity();
  for (int64_t b = 0; b < q_.batch(); ++b) {
    for (const RowRange& range : part_.q_padding[part_.q_padding.size() == 1 ? 0 : b]) {
      for (int64_t n = 0; n < q_.heads(); ++n) {
        for (int64_t s = range.begin; s < range.end; ++s) {
          store_from_double(output_.max.row(b, n, s), output_.max.dtype, 0, kEmpty);
          store_from_double(output_.sum.row(b, n, s), output_.sum.dtype, 0, 0);
          store_from_double(output_.lse.row(b, n, s), output_.lse.dtype, 0, kEmpty);
        }
      }
    }
  }
}

LocalBackward::LocalBackward(double scale, const ConstTensorView& q, const ConstTensorView& out,
                             const ConstTensorView& lse, const ConstTensorView& dout, const ConstTensorView& dlse,
                             const GradsView& grads, const Extras& extras, const Parallel& parallel)
    : scale_(scale),
      q_(q),
      lse_(lse),
      dout_(dout),
      pairs_(extras.pairs),
      dq_(grads.dq),
      dbias_(grads.dbias),
      parallel_(parallel) {
  dq_sum_ = accumulator_for(dq_, dq_buffer_);
  const DType accumulator = accumulator_of(q.dtype);
  delta_ = Buffer(q.batch() * q.heads() * q.rows() * size_of(accumulator));
  delta_view_ = stats_view(delta_.data(), accumulator, q.batch(), q.heads(), q.rows());
  row_delta(out, dout, dlse, delta_view_, parallel_);
  if (extras.sink.data && grads.dsink.data) sink_gradient(extras.sink, lse, delta_view_, grads.dsink, parallel_);
}

void LocalBackward::attend(std::span<const Tile> tiles, const ConstTensorView& k, const ConstTensorView& v,
                           const TensorView& dk, const TensorView& dv, bool begins,
                           const std::function<void()>& arrived) {
  BackwardArgs args;
  args.q = q_;
  args.k = k;
  args.v = v;
  args.dout = dout_;
  args.lse = lse_;
  args.delta = delta_view_;
  args.tiles = tiles;
  args.scale = scale_;
  args.dq = dq_sum_;
  args.dk = dk;
  args.dv = dv;
  args.dq_begin = first_;
  args.dkv_begin = begins;
  args.before_accumulate = arrived;
  args.pairs = pairs_;
  args.dbias = dbias_;
  first_ = false;
  const WorkspacePool::Lease workspace = WorkspacePool::process().take();
  attend_backward(args, *workspace, parallel_);
}

void LocalBackward::finish() {
  if (dq_.data == dq_sum_.data || dq_.num_elements() == 0) return;
  const auto head_of = [](const TensorView& view, int64_t batch, int64_t head) {
    return TensorView{view.row(batch, head, 0), view.dtype, {1, 1, view.rows(), view.dim()}, view.stride};
  };
  parallel_.run(static_cast<int>(dq_.batch() * dq_.heads()), [&](int i) {
    const int64_t batch = i / dq_.heads(), head = i % dq_.heads();
    copy(head_of(dq_sum_, batch, head), head_of(dq_, batch, head));
  });
}

}  // namespace ringspan
