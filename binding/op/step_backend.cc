#include "binding/op/step_backend.h"

#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "ringspan/softmax/empty_row.h"

#include "binding/base/errors.h"
#include "binding/base/softmax_tensors.h"

namespace ringspan::binding {
namespace {

using at::Tensor;
using torch::jit::Stack;

// Found at each call: kernels come and go with what registers them.
c10::OperatorHandle step_op(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

// int64 [n, 11] on the CPU, the fields of Tile in their order.
Tensor table_of(const std::vector<Tile>& tiles) {
  std::vector<int64_t> words;
  words.reserve(tiles.size() * 11);
  for (const Tile& t : tiles) {
    for (const int64_t word : {t.batch, t.q_row0, t.q_rows, t.q_pos0, t.q_stride, t.kv_row0, t.kv_rows, t.kv_pos0,
                               t.kv_stride, t.lo, t.hi}) {
      words.push_back(word);
    }
  }
  return at::tensor(words, at::kLong).view({-1, 11});
}

Tensor wide_like(const Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat ? tensor : at::empty(tensor.sizes(), tensor.options().dtype(at::kFloat));
}

// dsink_n = - sum over rows of e^(sink - lse) delta, delta = dout . out; an empty row has no part.
void sink_gradient(const BackwardTensors& t) {
  const Tensor delta = (t.grad_out.to(at::kFloat) * t.out.to(at::kFloat)).sum(-1);
  const Tensor weight =
      at::where(t.lse == kEmptyRowMax, at::zeros({}, t.lse.options()), (t.sink.view({1, -1, 1}) - t.lse).exp());
  t.dsink.copy_((weight * delta).sum(at::IntArrayRef{0, 2}).neg());
}

}  // namespace

bool choose_step_ops(const Call& call, const Tensor& query, const std::vector<std::string>& given) {
  const bool on_cpu = query.device().is_cpu();
  const c10::DispatchKey key = c10::computeDispatchKey(std::nullopt, std::nullopt, query.device());
  const c10::OperatorHandle op = step_op("ringspan::_step_refusal");
  if (!op.hasKernelForDispatchKey(key)) {
    if (on_cpu) return false;
    throw Unsupported(concat("query is on device ", query.device().str(),
                             ", for which no step ops are registered; move query, key and value to the CPU"));
  }
  const Problem& p = call.problem();
  c10::List<std::string> names;
  for (const std::string& name : given) names.push_back(name);
  Stack stack = {query, std::vector<int64_t>{call.group.size, p.q_heads, p.kv_heads, p.qk_dim, p.v_dim}, names};
  op.callBoxed(stack);
  std::string refusal = stack[0].toStringRef();
  if (refusal.empty() && moves_queries(*call.plan)) {
    refusal = concat("schedule ", name_of(call.plan->schedule), " moves query rows, which the ops of device ",
                     query.device().str(), " do not; use ring, gather, pruned or double_ring");
  }
  if (refusal.empty()) return true;
  if (on_cpu) return false;
  throw Unsupported(refusal);
}

StepForward::StepForward(const Call& call, TorchStore& store, const ForwardTensors& tensors)
    : part_(*call.plan), store_(store), tensors_(tensors), out_(wide_like(tensors.out)) {
  store.bind(Payload::kK, tensors.k);
  store.bind(Payload::kV, tensors.v);
}

void StepForward::attend(const Step& step, bool begins, bool finishes) {
  if (begins) {
    out_.zero_();
    tensors_.max.fill_(kEmptyRowMax);
    tensors_.sum.zero_();
  }
  if (!step.tiles.empty()) {
    const Tensor k = store_.tensor(Payload::kK, step.kv), v = store_.tensor(Payload::kV, step.kv);
    Stack stack = {tensors_.q, k, v, table_of(step.tiles), part_.problem.scale, out_, tensors_.max, tensors_.sum};
    step_op("ringspan::_step_forward").callBoxed(stack);
  }
  if (!finishes) return;
  if (tensors_.sink.defined()) {
    join_sink();
    empty_padding();
  }
  tensors_.lse.copy_(tensors_.max + tensors_.sum.log());
  if (!out_.is_same(tensors_.out)) tensors_.out.copy_(out_);
}

// One more part, of the max `sink`, the sum 1 and the output 0. An empty row and a sink of -inf stay empty.
void StepForward::join_sink() {
  const Tensor sink = tensors_.sink.view({1, -1, 1});
  const JoinedParts joined = join_parts(tensors_.max, tensors_.sum, sink, at::ones({}, sink.options()));
  out_.mul_(joined.share.unsqueeze(-1));
  tensors_.max.copy_(joined.max);
  tensors_.sum.copy_(joined.sum);
}

// A row that holds no position is no row of the sequence; the sink does not join it.
void StepForward::empty_padding() {
  const bool shared = part_.q_padding.size() == 1;
  for (int64_t b = 0; b < tensors_.q.size(0); ++b) {
    for (const RowRange& range : part_.q_padding[shared ? 0 : b]) {
      const int64_t rows = range.end - range.begin;
      tensors_.max.select(0, b).narrow(1, range.begin, rows).fill_(kEmptyRowMax);
      tensors_.sum.select(0, b).narrow(1, range.begin, rows).zero_();
    }
  }
}

StepBackward::StepBackward(const Call& call, TorchStore& store, const BackwardTensors& tensors)
    : part_(*call.plan), store_(store), tensors_(tensors), dq_(wide_like(tensors.dq)) {
  store.bind(Payload::kK, tensors.k);
  store.bind(Payload::kV, tensors.v);
  dk_ = sums_at_home(part_, Payload::kDk) ? wide_like(tensors.dk) : tensors.dk;
  dv_ = sums_at_home(part_, Payload::kDv) ? wide_like(tensors.dv) : tensors.dv;
  store.bind(Payload::kDk, dk_);
  store.bind(Payload::kDv, dv_);
  dq_.zero_();
  if (tensors_.dsink.defined()) sink_gradient(tensors_);
}

void StepBackward::attend_backward(const Step& step, const std::function<void()>& arrived) {
  const Tensor k = store_.tensor(Payload::kK, step.kv), v = store_.tensor(Payload::kV, step.kv);
  // The slot may still be on its way, so the step has gradients of its own.
  const auto zeros = [](const Tensor& like) { return at::zeros(like.sizes(), like.options().dtype(at::kFloat)); };
  const Tensor own_dk = zeros(k), own_dv = zeros(v);
  if (!step.tiles.empty()) {
    const BackwardTensors& t = tensors_;
    Stack stack = {t.q, k, v, t.out, t.lse, t.grad_out, table_of(step.tiles), part_.problem.scale, dq_, own_dk, own_dv};
    step_op("ringspan::_step_backward").callBoxed(stack);
  }
  arrived();
  Operand place = step.kv;
  place.slot = step.dkv.slot;
  Tensor dk = store_.tensor(Payload::kDk, place), dv = store_.tensor(Payload::kDv, place);
  if (step.dkv.begins) {
    dk.copy_(own_dk);
    dv.copy_(own_dv);
  } else {
    dk.add_(own_dk);
    dv.add_(own_dv);
  }
}

void StepBackward::finish() {
  for (const auto& [sum, caller] :
       {std::pair(&dq_, &tensors_.dq), std::pair(&dk_, &tensors_.dk), std::pair(&dv_, &tensors_.dv)}) {
    if (!sum->is_same(*caller)) caller->copy_(*sum);
  }
}

// Tensors are [B, N, S, D] views of the call's; k, v those of the step's owner; statistics and gradients fp32. `tiles`
// is int64 [n, 11] on the CPU: batch, q_row0, q_rows, q_pos0, q_stride, kv_row0, kv_rows, kv_pos0, kv_stride, lo, hi.
// `sizes`: ranks, query heads, KV heads, head dim of q and k, head dim of v.
TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  m.def("_step_refusal(Tensor query, int[] sizes, str[] given) -> str");
  m.def(
      "_step_forward(Tensor query, Tensor key, Tensor value, Tensor tiles, float scale, Tensor(a!) out, "
      "Tensor(b!) max, Tensor(c!) sum) -> ()");
  m.def(
      "_step_backward(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor grad_out, Tensor tiles, "
      "float scale, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> ()");
}

}  // namespace ringspan::binding
