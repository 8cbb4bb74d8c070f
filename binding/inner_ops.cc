#include "binding/inner_ops.h"

#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "binding/agreed_call.h"
#include "binding/errors.h"
#include "binding/run.h"
#include "binding/tensors.h"

namespace ringspan::binding {
namespace {

using at::Tensor;
using std::string;
using OptionalTensor = std::optional<Tensor>;
using NameList = std::optional<c10::List<string>>;
using ForwardTuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using BackwardTuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

PairArguments read_pairs(const OptionalTensor& bias, const OptionalTensor& mask, const OptionalTensor& slopes,
                         double softcap, double dropout_p, at::IntArrayRef places) {
  PairArguments pairs{.bias = bias, .mask = mask, .slopes = slopes, .softcap = softcap, .dropout_p = dropout_p};
  if (!places.empty()) read_places(places, pairs);
  return pairs;
}

int64_t read_seed(const Tensor& seed) {
  RINGSPAN_CHECK(seed.scalar_type() == at::kLong && seed.numel() == 1 && seed.device().is_cpu(), "seed is ",
                 toString(seed.scalar_type()), " ", seed.sizes(), " on ", seed.device().str(),
                 "; it must be one int64 on the CPU");
  return seed.item<int64_t>();
}

ForwardTuple attention_forward(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& sink,
                               at::IntArrayRef spec, at::TensorList tables, double scale, string layout,
                               int64_t num_heads, string group_name, string schedule, string exchange,
                               bool assume_agreed, bool needs_grad, const OptionalTensor& bias,
                               const OptionalTensor& attn_mask, const OptionalTensor& slopes,
                               const OptionalTensor& seed, double softcap, double dropout_p, at::IntArrayRef places,
                               NameList batch_groups, NameList head_groups) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return translate_errors([&] {
    const Group group = find_group(group_name, query.device().type());
    CallArguments arguments{spec,     tables,   scale,         layout,     num_heads,       group_name,
                            schedule, exchange, assume_agreed, needs_grad, sink.has_value()};
    auto [call, operands] = check_or_refuse(group, assume_agreed, [&] {
      arguments.pairs = read_pairs(bias, attn_mask, slopes, softcap, dropout_p, places);
      arguments.batch_share = share_of(batch_groups);
      arguments.head_share = share_of(head_groups);
      RINGSPAN_CHECK(dropout_p == 0 || seed, "dropout_p is ", dropout_p, " and no seed was given");
      if (dropout_p != 0) arguments.pairs.seed = read_seed(*seed);
      return prepare(group, query, key, value, sink, arguments);
    });
    const Agreed agreed = agree(call, arguments, CallKind::kForward, 0);
    operands.seed = agreed.seed;
    const Output output = run_attention(call, operands);
    return ForwardTuple{output.out, output.max, output.sum, output.lse,
                        at::tensor({agreed.number, agreed.seed}, query.options().dtype(at::kLong))};
  });
}

void check_gradient(const char* name, const Tensor& gradient, at::IntArrayRef size, at::ScalarType dtype,
                    at::Device device) {
  RINGSPAN_CHECK(gradient.sizes() == size && gradient.scalar_type() == dtype && gradient.device() == device, name,
                 " is ", toString(gradient.scalar_type()), " ", gradient.sizes(), " on ", gradient.device().str(),
                 "; it must be ", toString(dtype), " ", size, " on ", device.str());
}

void check_saved(const Call& call, at::Device device, const Tensor& out, const Tensor& lse,
                 const OptionalTensor& grad_out, const OptionalTensor& grad_lse) {
  const Problem& p = call.problem();
  const int64_t rows = call.plan->q_rows[call.group.rank];
  const std::vector<int64_t> out_shape = shape_in(call.layout, p.batch, p.q_heads, rows, p.v_dim);
  const std::vector<int64_t> stats_shape = {p.batch, p.q_heads, rows};
  const at::ScalarType accumulator = torch_dtype(accumulator_of(p.dtype));
  check_gradient("out", out, out_shape, torch_dtype(p.dtype), device);
  check_gradient("lse", lse, stats_shape, accumulator, device);
  if (grad_out) check_gradient("grad_out", *grad_out, out_shape, torch_dtype(p.dtype), device);
  if (grad_lse) check_gradient("grad_lse", *grad_lse, stats_shape, accumulator, device);
}

BackwardTuple attention_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query,
                                 const Tensor& key, const Tensor& value, const OptionalTensor& sink, const Tensor& out,
                                 const Tensor& lse, const Tensor& forward_call, at::IntArrayRef spec,
                                 at::TensorList tables, double scale, string layout, int64_t num_heads,
                                 string group_name, string schedule, string exchange, bool assume_agreed,
                                 const OptionalTensor& bias, const OptionalTensor& attn_mask,
                                 const OptionalTensor& slopes, double softcap, double dropout_p, at::IntArrayRef places,
                                 bool wants_bias, NameList batch_groups, NameList head_groups) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return translate_errors([&] {
    const Group group = find_group(group_name, query.device().type());
    CallArguments arguments{spec,
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
    const Tensor words = forward_call.cpu();
    const int64_t number = words.const_data_ptr<int64_t>()[0], seed = words.const_data_ptr<int64_t>()[1];
    auto [call, operands] = check_or_refuse(group, assume_agreed, [&] {
      arguments.pairs = read_pairs(bias, attn_mask, slopes, softcap, dropout_p, places);
      arguments.batch_share = share_of(batch_groups);
      arguments.head_share = share_of(head_groups);
      // The forward's seed is settled.
      arguments.pairs.seed = seed;
      arguments.pairs.seed_is_drawn = false;
      arguments.pairs.wants_bias_gradient = wants_bias;
      std::vector<std::string> more;
      if (grad_lse) more.emplace_back("the gradient of lse");
      auto prepared = prepare(group, query, key, value, sink, arguments, std::move(more));
      check_saved(prepared.first, query.device(), out, lse, grad_out, grad_lse);
      return prepared;
    });
    agree(call, arguments, CallKind::kBackward, number);
    operands.seed = seed;
    const InputGradients gradients = run_attention_backward(
        call, operands, {out, lse, grad_out.value_or(Tensor()), grad_lse.value_or(Tensor())}, wants_bias);
    return BackwardTuple{gradients.query, gradients.key, gradients.value,
                         sink ? gradients.sink.to(sink->scalar_type()) : gradients.sink,
                         wants_bias ? gradients.bias.to(bias->scalar_type()) : gradients.bias};
  });
}

// Shapes only. The heads of K/V are on an axis of their own, or hidden in H = heads * dim.
std::vector<c10::SymInt> meta_out_shape(const Tensor& query, const Tensor& key, const Tensor& value, const Axes& axes,
                                        const string& layout, const c10::SymInt& num_heads) {
  TORCH_CHECK_VALUE(query.dim() == axes.dims && key.dim() == axes.dims && value.dim() == axes.dims,
                    "query, key and value have ", query.dim(), ", ", key.dim(), " and ", value.dim(),
                    " dimensions; layout ", layout, " has ", axes.dims);
  auto shape = query.sym_sizes().vec();
  if (axes.head < 0) {
    const c10::SymInt kv_heads = key.sym_size(2) / (query.sym_size(2) / num_heads);
    shape[2] = num_heads * (value.sym_size(2) / kv_heads);
  } else {
    shape.back() = value.sym_size(-1);
  }
  return shape;
}

ForwardTuple attention_forward_meta(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor&,
                                    c10::SymIntArrayRef, at::TensorList, double, string layout, c10::SymInt num_heads,
                                    string, string, string, bool, bool, const OptionalTensor&, const OptionalTensor&,
                                    const OptionalTensor&, const OptionalTensor&, double, double, c10::SymIntArrayRef,
                                    NameList, NameList) {
  const Axes axes = translate_errors([&] { return axes_of(parse_layout(layout)); });
  const auto out_shape = meta_out_shape(query, key, value, axes, layout, num_heads);
  const c10::SymInt batch = axes.batch < 0 ? c10::SymInt(1) : query.sym_size(axes.batch);
  const auto accumulator = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto stats = [&] {
    return at::empty_symint({batch, num_heads, query.sym_size(axes.row)}, query.options().dtype(accumulator));
  };
  return {at::empty_symint(out_shape, query.options()), stats(), stats(), stats(),
          at::empty({2}, query.options().dtype(at::kLong))};
}

BackwardTuple attention_backward_meta(const OptionalTensor&, const OptionalTensor&, const Tensor& query,
                                      const Tensor& key, const Tensor& value, const OptionalTensor& sink, const Tensor&,
                                      const Tensor& lse, const Tensor&, c10::SymIntArrayRef, at::TensorList, double,
                                      string, c10::SymInt, string, string, string, bool, const OptionalTensor& bias,
                                      const OptionalTensor&, const OptionalTensor&, double, double, c10::SymIntArrayRef,
                                      bool wants_bias, NameList, NameList) {
  const auto none = [&] { return at::empty({0}, lse.options()); };
  return {empty_dense(query), empty_dense(key), empty_dense(value), sink ? empty_dense(*sink) : none(),
          bias && wants_bias ? empty_dense(*bias) : none()};
}

using ForwardSignature = ForwardTuple(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                      c10::SymIntArrayRef, at::TensorList, double, string, c10::SymInt, string, string,
                                      string, bool, bool, const OptionalTensor&, const OptionalTensor&,
                                      const OptionalTensor&, const OptionalTensor&, double, double, c10::SymIntArrayRef,
                                      NameList, NameList);
using BackwardSignature = BackwardTuple(const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                        const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                        const Tensor&, c10::SymIntArrayRef, at::TensorList, double, string, c10::SymInt,
                                        string, string, string, bool, const OptionalTensor&, const OptionalTensor&,
                                        const OptionalTensor&, double, double, c10::SymIntArrayRef, bool, NameList,
                                        NameList);

}  // namespace

ForwardResult call_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value, const OpArguments& a,
                                     bool needs_grad) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ringspan::attention_forward", "").typed<ForwardSignature>();
  auto [out, max, sum, lse, call] =
      op.call(query, key, value, a.sink, a.spec, a.tables, a.scale, a.layout, a.num_heads, a.group_name, a.schedule,
              a.exchange, a.assume_agreed, needs_grad, a.bias, a.attn_mask, a.slopes, a.seed, a.softcap, a.dropout_p,
              a.places, a.batch_groups, a.head_groups);
  return {std::move(out), std::move(max), std::move(sum), std::move(lse), std::move(call)};
}

BackwardResult call_attention_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                                       const OpArguments& a, const SavedResults& saved, bool wants_bias) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ringspan::attention_backward", "").typed<BackwardSignature>();
  auto [dq, dk, dv, dsink, dbias] =
      op.call(saved.grad_out, saved.grad_lse, query, key, value, a.sink, saved.out, saved.lse, saved.call, a.spec,
              a.tables, a.scale, a.layout, a.num_heads, a.group_name, a.schedule, a.exchange, a.assume_agreed, a.bias,
              a.attn_mask, a.slopes, a.softcap, a.dropout_p, a.places, wants_bias, a.batch_groups, a.head_groups);
  return {std::move(dq), std::move(dk), std::move(dv), std::move(dsink), std::move(dbias)};
}

// The twins named `_visible_*` run the same code in the caller's modes: CommDebugMode counts the collectives through
// them (python/ringspan/_ops.py).
TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  const string common =
      "SymInt[] spec, Tensor[] tables, float scale, str layout, SymInt num_heads, str group_name, str schedule, "
      "str exchange, bool assume_agreed, ";
  const string pairs = "Tensor? bias=None, Tensor? attn_mask=None, Tensor? slopes=None, ";
  const string numbers = "float softcap=0.0, float dropout_p=0.0, SymInt[] places=[]";
  const string groups = ", str[]? batch_groups=None, str[]? head_groups=None";
  const string forward = "(Tensor query, Tensor key, Tensor value, Tensor? sink, " + common + "bool needs_grad, " +
                         pairs + "Tensor? seed=None, " + numbers + groups +
                         ") -> (Tensor out, Tensor max, Tensor sum, Tensor lse, Tensor call)";
  const string backward =
      "(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor? sink, Tensor out, "
      "Tensor lse, Tensor call, " +
      common + pairs + numbers + ", bool wants_bias=False" + groups +
      ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor dbias)";
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
