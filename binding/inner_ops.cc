#include "binding/inner_ops.h"

#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "ringspan/ring/executor.h"

#include "binding/call.h"
#include "binding/content_hash.h"
#include "binding/errors.h"
#include "binding/parallel.h"
#include "binding/tensors.h"
#include "binding/torch_backend.h"

namespace ringspan::binding {
namespace {

using at::Tensor;
using std::string;

bool has_peers(const Group& group) { return group.size > 1 && !group.is_fake(); }

// Runs the checks of a call, and tells the peers where they fail.
template <class Check>
auto check_or_refuse(const Group& group, bool assume_agreed, Check&& check) {
  const auto refuse = [&](RefusalKind kind, const std::exception& error) {
    if (has_peers(group) && !assume_agreed) Agreement::of(group)->refuse(group, kind, message_of(error));
  };
  try {
    return check();
  } catch (const Unsupported& error) {
    refuse(RefusalKind::kUnsupported, error);
    throw;
  } catch (const std::exception& error) {
    refuse(RefusalKind::kBadArgument, error);
    throw;
  }
}

int64_t agree(const Call& call, const CallArguments& arguments, CallKind kind, int64_t forward_number) {
  if (!has_peers(call.group) || arguments.assume_agreed) return 0;
  const Proposal proposal{.kind = kind,
                          .forward_number = forward_number,
                          .needs_grad = arguments.needs_grad,
                          .hash = mix(call.hash ^ (arguments.has_sink ? 1 : 0)),
                          .describe = [&] { return describe_call(call, arguments); }};
  return Agreement::of(call.group)->agree(call.group, proposal);
}

ForwardResult run_attention(const Call& call, const Tensor& query, const Tensor& key, const Tensor& value,
                            const Tensor& sink, int64_t number) {
  const Problem& p = call.problem();
  const int64_t rows = call.plan->q_rows[call.group.rank];
  const auto stats_options = query.options().dtype(torch_dtype(accumulator_of(p.dtype)));
  const Tensor out = at::empty(shape_in(call.layout, p.batch, p.q_heads, rows, p.v_dim), query.options());
  const Tensor max = at::empty({p.batch, p.q_heads, rows}, stats_options);
  const Tensor sum = at::empty({p.batch, p.q_heads, rows}, stats_options);
  const Tensor lse = at::empty({p.batch, p.q_heads, rows}, stats_options);
  TorchForward backend(call,
                       {.q = as_bnsd(query, call.layout, p.q_heads),
                        .k = as_bnsd(key, call.layout, p.kv_heads),
                        .v = as_bnsd(value, call.layout, p.kv_heads),
                        .out = as_bnsd(out, call.layout, p.q_heads),
                        .max = max,
                        .sum = sum,
                        .lse = lse,
                        .sink = sink},
                       torch_parallel());
  run_forward(call.plan->forward, backend);
  return {out, max, sum, lse, at::full({1}, number, query.options().dtype(at::kLong))};
}

ForwardResult attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                const std::optional<Tensor>& sink, at::IntArrayRef spec, at::TensorList tables,
                                double scale, string layout, int64_t num_heads, string group_name, string schedule,
                                string exchange, bool assume_agreed, bool needs_grad) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const CallArguments arguments{spec,     tables,   scale,         layout,     num_heads,       group_name,
                                schedule, exchange, assume_agreed, needs_grad, sink.has_value()};
  return translate_errors([&] {
    const Group group = find_group(group_name);
    const auto [call, dense_sink] = check_or_refuse(group, assume_agreed, [&] {
      Call prepared = prepare_call(group, query, key, value, arguments);
      Tensor dense = prepare_sink(prepared, sink);
      return std::pair(std::move(prepared), std::move(dense));
    });
    const int64_t number = agree(call, arguments, CallKind::kForward, 0);
    return run_attention(call, query, key, value, dense_sink, number);
  });
}

void check_gradient(const char* name, const Tensor& gradient, at::IntArrayRef size, at::ScalarType dtype) {
  RINGSPAN_CHECK(gradient.sizes() == size && gradient.scalar_type() == dtype && gradient.device().is_cpu(), name,
                 " is ", toString(gradient.scalar_type()), " ", gradient.sizes(), " on ", gradient.device().str(),
                 "; it must be ", toString(dtype), " ", size, " on the CPU");
}

struct BackwardInputs {
  const std::optional<Tensor>& grad_out;
  const std::optional<Tensor>& grad_lse;
  const Tensor &query, &key, &value;
  const std::optional<Tensor>& sink;
  const Tensor &out, &lse;
};

// The call, and the sink as prepare_sink gives it.
std::pair<Call, Tensor> prepare_backward(const Group& group, const BackwardInputs& inputs,
                                         const CallArguments& arguments) {
  Call call = prepare_call(group, inputs.query, inputs.key, inputs.value, arguments);
  const Problem& p = call.problem();
  const int64_t rows = call.plan->q_rows[group.rank];
  const std::vector<int64_t> out_shape = shape_in(call.layout, p.batch, p.q_heads, rows, p.v_dim);
  const std::vector<int64_t> stats_shape = {p.batch, p.q_heads, rows};
  const at::ScalarType accumulator = torch_dtype(accumulator_of(p.dtype));
  check_gradient("out", inputs.out, out_shape, torch_dtype(p.dtype));
  check_gradient("lse", inputs.lse, stats_shape, accumulator);
  if (inputs.grad_out) check_gradient("grad_out", *inputs.grad_out, out_shape, torch_dtype(p.dtype));
  if (inputs.grad_lse) check_gradient("grad_lse", *inputs.grad_lse, stats_shape, accumulator);
  Tensor sink = prepare_sink(call, inputs.sink);
  return {std::move(call), std::move(sink)};
}

BackwardResult run_attention_backward(const Call& call, const BackwardInputs& inputs, const Tensor& sink) {
  const Problem& p = call.problem();
  const Tensor dsink = sink.defined() ? at::empty_like(sink) : at::empty({0}, inputs.lse.options());
  const auto dense_like = [](const Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()); };
  const Tensor dq = dense_like(inputs.query), dk = dense_like(inputs.key), dv = dense_like(inputs.value);
  const Tensor grad_out =
      inputs.grad_out ? *inputs.grad_out : at::zeros({}, inputs.out.options()).expand(inputs.out.sizes());
  TorchBackward backend(call,
                        {.q = as_bnsd(inputs.query, call.layout, p.q_heads),
                         .k = as_bnsd(inputs.key, call.layout, p.kv_heads),
                         .v = as_bnsd(inputs.value, call.layout, p.kv_heads),
                         .out = as_bnsd(inputs.out, call.layout, p.q_heads),
                         .lse = inputs.lse,
                         .grad_out = as_bnsd(grad_out, call.layout, p.q_heads),
                         .grad_lse = inputs.grad_lse.value_or(Tensor()),
                         .dq = as_bnsd(dq, call.layout, p.q_heads),
                         .dk = as_bnsd(dk, call.layout, p.kv_heads),
                         .dv = as_bnsd(dv, call.layout, p.kv_heads),
                         .sink = sink,
                         .dsink = sink.defined() ? dsink : Tensor()},
                        torch_parallel());
  run_backward(call.plan->backward, backend);
  return {dq, dk, dv, inputs.sink ? dsink.to(inputs.sink->scalar_type()) : dsink};
}

BackwardResult attention_backward(const std::optional<Tensor>& grad_out, const std::optional<Tensor>& grad_lse,
                                  const Tensor& query, const Tensor& key, const Tensor& value,
                                  const std::optional<Tensor>& sink, const Tensor& out, const Tensor& lse,
                                  const Tensor& call_number, at::IntArrayRef spec, at::TensorList tables, double scale,
                                  string layout, int64_t num_heads, string group_name, string schedule, string exchange,
                                  bool assume_agreed) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const CallArguments arguments{spec,
                                tables,
                                scale,
                                layout,
                                num_heads,
                                group_name,
                                schedule,
                                exchange,
                                assume_agreed,
                                /*needs_grad=*/true,
                                sink.has_value()};
  const BackwardInputs inputs{grad_out, grad_lse, query, key, value, sink, out, lse};
  return translate_errors([&] {
    const Group group = find_group(group_name);
    const auto [call, dense_sink] =
        check_or_refuse(group, assume_agreed, [&] { return prepare_backward(group, inputs, arguments); });
    agree(call, arguments, CallKind::kBackward, call_number.item<int64_t>());
    return run_attention_backward(call, inputs, dense_sink);
  });
}

// Shapes only. The heads of K/V are on an axis of their own, or hidden in H = heads * dim.
std::vector<c10::SymInt> meta_out_shape(const Tensor& query, const Tensor& key, const Tensor& value,
                                        const string& layout, const c10::SymInt& num_heads) {
  const bool flat = layout == "BSH" || layout == "SBH";
  TORCH_CHECK_VALUE(query.dim() == (flat ? 3 : 4) && key.dim() == query.dim() && value.dim() == query.dim(),
                    "query, key and value have ", query.dim(), ", ", key.dim(), " and ", value.dim(),
                    " dimensions; layout ", layout, " has ", flat ? 3 : 4);
  auto shape = query.sym_sizes().vec();
  if (flat) {
    const c10::SymInt kv_heads = key.sym_size(2) / (query.sym_size(2) / num_heads);
    shape[2] = num_heads * (value.sym_size(2) / kv_heads);
  } else {
    shape[3] = value.sym_size(3);
  }
  return shape;
}

ForwardResult attention_forward_meta(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const std::optional<Tensor>&, c10::SymIntArrayRef, at::TensorList, double,
                                     string layout, c10::SymInt num_heads, string, string, string, bool, bool) {
  const auto out_shape = meta_out_shape(query, key, value, layout, num_heads);
  const bool sbh = layout == "SBH";
  const c10::SymInt batch = query.sym_size(sbh ? 1 : 0);
  const c10::SymInt rows = query.sym_size(sbh ? 0 : layout == "BNSD" ? 2 : 1);
  const auto accumulator = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto stats = [&] { return at::empty_symint({batch, num_heads, rows}, query.options().dtype(accumulator)); };
  return {at::empty_symint(out_shape, query.options()), stats(), stats(), stats(),
          at::empty({1}, query.options().dtype(at::kLong))};
}

BackwardResult attention_backward_meta(const std::optional<Tensor>&, const std::optional<Tensor>&, const Tensor& query,
                                       const Tensor& key, const Tensor& value, const std::optional<Tensor>& sink,
                                       const Tensor&, const Tensor& lse, const Tensor&, c10::SymIntArrayRef,
                                       at::TensorList, double, string, c10::SymInt, string, string, string, bool) {
  const auto dense_like = [](const Tensor& tensor) { return at::empty_symint(tensor.sym_sizes(), tensor.options()); };
  return {dense_like(query), dense_like(key), dense_like(value),
          sink ? dense_like(*sink) : at::empty({0}, lse.options())};
}

}  // namespace

ForwardResult call_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const std::optional<Tensor>& sink, c10::SymIntArrayRef spec, at::TensorList tables,
                                     double scale, const string& layout, c10::SymInt num_heads,
                                     const string& group_name, const string& schedule, const string& exchange,
                                     bool assume_agreed, bool needs_grad) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ringspan::attention_forward", "")
                             .typed<ForwardResult(const Tensor&, const Tensor&, const Tensor&,
                                                  const std::optional<Tensor>&, c10::SymIntArrayRef, at::TensorList,
                                                  double, string, c10::SymInt, string, string, string, bool, bool)>();
  return op.call(query, key, value, sink, spec, tables, scale, layout, std::move(num_heads), group_name, schedule,
                 exchange, assume_agreed, needs_grad);
}

BackwardResult call_attention_backward(const std::optional<Tensor>& grad_out, const std::optional<Tensor>& grad_lse,
                                       const Tensor& query, const Tensor& key, const Tensor& value,
                                       const std::optional<Tensor>& sink, const Tensor& out, const Tensor& lse,
                                       const Tensor& call_number, c10::SymIntArrayRef spec, at::TensorList tables,
                                       double scale, const string& layout, c10::SymInt num_heads,
                                       const string& group_name, const string& schedule, const string& exchange,
                                       bool assume_agreed) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("ringspan::attention_backward", "")
          .typed<BackwardResult(const std::optional<Tensor>&, const std::optional<Tensor>&, const Tensor&,
                                const Tensor&, const Tensor&, const std::optional<Tensor>&, const Tensor&,
                                const Tensor&, const Tensor&, c10::SymIntArrayRef, at::TensorList, double, string,
                                c10::SymInt, string, string, string, bool)>();
  return op.call(grad_out, grad_lse, query, key, value, sink, out, lse, call_number, spec, tables, scale, layout,
                 std::move(num_heads), group_name, schedule, exchange, assume_agreed);
}

// The twins named `_visible_*` run the same code in the caller's modes: CommDebugMode counts the collectives through
// them (python/ringspan/_ops.py).
TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  const string forward =
      "(Tensor query, Tensor key, Tensor value, Tensor? sink, SymInt[] spec, Tensor[] tables, float scale, "
      "str layout, SymInt num_heads, str group_name, str schedule, str exchange, bool assume_agreed, bool needs_grad) "
      "-> "
      "(Tensor out, Tensor max, Tensor sum, Tensor lse, Tensor call_number)";
  const string backward =
      "(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor? sink, Tensor out, Tensor "
      "lse, "
      "Tensor call_number, SymInt[] spec, Tensor[] tables, float scale, str layout, SymInt num_heads, str group_name, "
      "str schedule, str exchange, bool assume_agreed) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)";
  m.def(("attention_forward" + forward).c_str(), tags);
  m.def(("attention_backward" + backward).c_str(), tags);
  m.def(("_visible_attention_forward" + forward).c_str(), tags);
  m.def(("_visible_attention_backward" + backward).c_str(), tags);
}

TORCH_LIBRARY_IMPL(ringspan, CompositeExplicitAutograd, m) {
  m.impl("attention_forward", &attention_forward);
  m.impl("attention_backward", &attention_backward);
}

TORCH_LIBRARY_IMPL(ringspan, CompositeImplicitAutograd, m) {
  m.impl("_visible_attention_forward", &attention_forward);
  m.impl("_visible_attention_backward", &attention_backward);
}

TORCH_LIBRARY_IMPL(ringspan, Meta, m) {
  m.impl("attention_forward", &attention_forward_meta);
  m.impl("attention_backward", &attention_backward_meta);
}

}  // namespace ringspan::binding
