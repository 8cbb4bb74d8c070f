#include "ringspan/ring/kernel_backend.h"

#include <utility>

namespace ringspan {
namespace {

// The block's heads of what a slot holds.
TensorView q_view(Store& store, Payload payload, const Operand& q, const HeadBlock& block) {
  return narrow(store.view(payload, q), 1, block.q_begin - q.head_begin, block.q_end - q.head_begin);
}
TensorView kv_view(Store& store, Payload payload, const Operand& kv, const HeadBlock& block) {
  return narrow(store.view(payload, kv), 1, block.kv_begin - kv.head_begin, block.kv_end - kv.head_begin);
}

// Calls action(view, view) for each head of each entry of both, in parallel.
template <class Action>
void for_each_head(const TensorView& from, const TensorView& to, const Parallel& parallel, Action&& action) {
  const auto head_of = [](const TensorView& view, int64_t batch, int64_t head) {
    return TensorView{view.row(batch, head, 0), view.dtype, {1, 1, view.rows(), view.dim()}, view.stride};
  };
  if (from.num_elements() == 0) return;
  parallel.run(static_cast<int>(from.batch() * from.heads()), [&](int i) {
    const int64_t batch = i / from.heads(), head = i % from.heads();
    action(head_of(from, batch, head), head_of(to, batch, head));
  });
}

void bind_inputs(Store& store, const InputsView& inputs) {
  store.bind(Payload::kQ, without_const(inputs.q));
  store.bind(Payload::kK, without_const(inputs.k));
  store.bind(Payload::kV, without_const(inputs.v));
}

}  // namespace

KernelForward::KernelForward(const RankPlan& part, Store& store, const InputsView& inputs, const OutputView& output,
                             const Extras& extras, const Parallel& parallel)
    : part_(part), store_(store), extras_(extras), parallel_(parallel) {
  check_extras(part, extras);
  bind_inputs(store, inputs);
  store.bind(Payload::kOut, output.out);
  store.bind(Payload::kMax, output.max);
  store.bind(Payload::kSum, output.sum);
  store.bind(Payload::kLse, output.lse);
  bind_row_tensors(part, store, extras.pairs);
}

// A call of one step needs no state between steps.
void KernelForward::begin(const Step& step, bool finishes) {
  parts_.reserve(part_.heads.size());
  for (const HeadBlock& block : part_.heads) {
    Part& one = parts_.emplace_back();
    one.heads = head_part(part_, store_, extras_.pairs, step.q, block);
    one.sink = narrow(extras_.sink, 1, block.q_begin, block.q_end);
    one.q = q_view(store_, Payload::kQ, step.q, block);
    one.output = {q_view(store_, Payload::kOut, step.q, block), q_view(store_, Payload::kMax, step.q, block),
                  q_view(store_, Payload::kSum, step.q, block), q_view(store_, Payload::kLse, step.q, block)};
    if (!finishes) one.state = {one.output.max, one.output.sum, accumulator_for(one.output.out, one.acc)};
  }
}

void KernelForward::attend(const Step& step, bool begins, bool finishes) {
  if (begins) begin(step, finishes);
  for (Part& one : parts_) {
    ForwardArgs args;
    args.q = one.q;
    args.k = kv_view(store_, Payload::kK, step.kv, one.heads.block);
    args.v = kv_view(store_, Payload::kV, step.kv, one.heads.block);
    args.tiles = step.tiles;
    args.scale = part_.problem.scale;
    args.state = one.state;
    args.begin = begins;
    args.finish = finishes;
    args.output = one.output;
    args.sink = one.sink;
    args.pairs = one.heads.inputs();
    args.fixed_order = fixes_order(part_.schedule);
    const WorkspacePool::Lease workspace = WorkspacePool::process().take();
    ringspan::attend(args, *workspace, parallel_);
    if (finishes && one.sink.is_given()) empty_padding(one.output);
  }
}

// The kernel gives the sink to every row. One that holds no position is no row of the sequence: it stays empty, and so
// adds nothing to the sink's gradient either.
void KernelForward::empty_padding(const OutputView& output) const {
  for (int64_t b = 0; b < output.out.batch(); ++b) {
    for (const RowRange& range : part_.q_padding[part_.q_padding.size() == 1 ? 0 : b]) {
      for (int64_t n = 0; n < output.out.heads(); ++n) {
        for (int64_t s = range.begin; s < range.end; ++s) {
          store_from_double(output.max.row(b, n, s), output.max.dtype, 0, kEmptyRowMax);
          store_from_double(output.sum.row(b, n, s), output.sum.dtype, 0, kEmptyRowSum);
          store_from_double(output.lse.row(b, n, s), output.lse.dtype, 0, kEmptyRowMax);
        }
      }
    }
  }
}

KernelBackward::KernelBackward(const RankPlan& part, Store& store, const BackwardInputsView& inputs,
                               const GradsView& grads, const Extras& extras, const Parallel& parallel)
    : part_(part), store_(store), extras_(extras), grads_(grads), parallel_(parallel) {
  check_extras(part, extras);
  check_dbias(part, extras.pairs, grads.dbias);
  const ConstTensorView& q = inputs.inputs.q;
  const OutputView& output = inputs.output;
  bind_inputs(store, inputs.inputs);
  store.bind(Payload::kDout, without_const(inputs.dout));
  store.bind(Payload::kLse, output.lse);
  bind_row_tensors(part, store, extras.pairs);
  const DType accumulator = accumulator_of(q.dtype);
  delta_ = Buffer(q.batch() * q.heads() * q.rows() * size_of(accumulator));
  const TensorView delta = stats_view(delta_.data(), accumulator, q.batch(), q.heads(), q.rows());
  row_delta(output.out, inputs.dout, inputs.dlse, delta, parallel);
  store.bind(Payload::kDelta, delta);
  if (extras.sink.is_given() && grads.dsink.is_given())
    sink_gradient(extras.sink, output.lse, delta, grads.dsink, parallel);
  bind_gradient(Payload::kDq, grads.dq, dq_);
  bind_gradient(Payload::kDk, grads.dk, dk_);
  bind_gradient(Payload::kDv, grads.dv, dv_);
  bind_dbias(part, store, grads.dbias);
  dq_travels_ = moves_dq(part);
}

void KernelBackward::bind_gradient(Payload payload, const TensorView& caller, Home& home) {
  home.caller = caller;
  home.sum = sums_at_home(part_, payload) ? accumulator_for(caller, home.buffer) : caller;
  store_.bind(payload, home.sum);
}

// The kernel adds to dbias. The caller's is zero at first; a buffer is what was there before.
void KernelBackward::begin_dbias(const Operand& place, bool begins) {
  const bool is_buffer = grads_.dbias.is_given() && part_.problem.bias.is_given() && place.slot != kOwnSlot;
  if (is_buffer && begins) fill_zero(store_.view(Payload::kDbias, place));
}

TensorView KernelBackward::dq_apart(const Step& step) {
  const Problem& p = part_.problem;
  const std::array<int64_t, 4> size{p.batch, step.q.head_end - step.q.head_begin, step.q.rows, p.qk_dim};
  const DType accumulator = accumulator_of(p.dtype);
  const int64_t bytes = size[0] * size[1] * size[2] * size[3] * size_of(accumulator);
  if (dq_apart_.bytes() < bytes) dq_apart_ = Buffer(bytes);
  return view_of(dq_apart_.data(), accumulator, Layout::kBNSD, size);
}

void KernelBackward::attend_backward(const Step& step, const std::function<void()>& arrived) {
  Operand dq_place = step.q, dkv_place = step.kv;
  dq_place.slot = step.dq.slot;
  dkv_place.slot = step.dkv.slot;
  // The kernel calls back before it touches dk and dv, not dq: a step adds to a dq that travels when it is done.
  const bool wants_dq = step.dq.is_computed(), wants_dkv = step.dkv.is_computed();
  const bool is_apart = is_dq_apart(step, dq_travels_);
  bool has_arrived = false;
  const auto arrive_once = [&] {
    if (!std::exchange(has_arrived, true)) arrived();
  };
  if (dq_travels_ && (step.dq.begins || grads_.dbias.is_given())) arrive_once();
  if (wants_dq) begin_dbias(dq_place, step.dq.begins);
  const TensorView dq = is_apart ? dq_apart(step) : wants_dq ? store_.view(Payload::kDq, dq_place) : TensorView{};
  for (const HeadBlock& block : part_.heads) {
    const HeadPart heads = head_part(part_, store_, extras_.pairs, step.q, block);
    BackwardArgs args;
    args.q = q_view(store_, Payload::kQ, step.q, block);
    args.k = kv_view(store_, Payload::kK, step.kv, block);
    args.v = kv_view(store_, Payload::kV, step.kv, block);
    args.dout = q_view(store_, Payload::kDout, step.q, block);
    args.lse = q_view(store_, Payload::kLse, step.q, block);
    args.delta = q_view(store_, Payload::kDelta, step.q, block);
    args.tiles = step.tiles;
    args.scale = part_.problem.scale;
    args.wants_dq = wants_dq;
    args.wants_dkv = wants_dkv;
    if (wants_dq) args.dq = narrow(dq, 1, block.q_begin - step.q.head_begin, block.q_end - step.q.head_begin);
    if (wants_dkv) {
      args.dk = kv_view(store_, Payload::kDk, dkv_place, block);
      args.dv = kv_view(store_, Payload::kDv, dkv_place, block);
    }
    args.dq_begin = step.dq.begins || is_apart;
    args.dkv_begin = step.dkv.begins;
    // Without it the kernel writes gradients while they are still in its caches.
    if (!has_arrived && store_.awaits(step.step, /*gradients=*/true)) args.before_accumulate = arrive_once;
    args.pairs = heads.inputs();
    args.fixed_order = fixes_order(part_.schedule);
    if (wants_dq && grads_.dbias.is_given()) args.dbias = dbias_part(part_, store_, grads_.dbias, dq_place, block);
    const WorkspacePool::Lease workspace = WorkspacePool::process().take();
    ringspan::attend_backward(args, *workspace, parallel_);
  }
  arrive_once();
  if (!is_apart) return;
  for_each_head(dq, store_.view(Payload::kDq, dq_place), parallel_,
                [](const TensorView& from, const TensorView& to) { add(from, to); });
}

void KernelBackward::finish() {
  for (const Home* home : {&dq_, &dk_, &dv_}) {
    if (home->caller.data == home->sum.data) continue;
    for_each_head(home->sum, home->caller, parallel_,
                  [](const TensorView& from, const TensorView& to) { copy(from, to); });
  }
}

}  // namespace ringspan
