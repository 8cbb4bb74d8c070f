// ringspan::attention, the public op: autograd over the two inner ops, and autocast.
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "binding/inner_ops.h"

namespace ringspan::binding {
namespace {

using at::Tensor;
using std::string;
using NameList = std::optional<c10::List<string>>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using AttentionResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // out, max, sum, lse

// Everything but tensors; those go through save_for_backward.
void save(AutogradContext& context, const OpArguments& a) {
  auto& data = context.saved_data;
  data["spec"] = c10::IValue(c10::SymIntArrayRef(a.spec));
  data["places"] = c10::IValue(c10::SymIntArrayRef(a.places));
  data["scale"] = a.scale;
  data["softcap"] = a.softcap;
  data["dropout_p"] = a.dropout_p;
  data["layout"] = a.layout;
  data["num_heads"] = c10::IValue(a.num_heads);
  data["group_name"] = a.group_name;
  data["schedule"] = a.schedule;
  data["exchange"] = a.exchange;
  data["assume_agreed"] = a.assume_agreed;
  data["batch_groups"] = c10::IValue(a.batch_groups);
  data["head_groups"] = c10::IValue(a.head_groups);
}

std::optional<Tensor> optional(const Tensor& tensor) { return tensor.defined() ? std::optional(tensor) : std::nullopt; }

// The order of the saved tensors; the tables follow.
enum Saved : size_t { kQuery, kKey, kValue, kOut, kLse, kCall, kSink, kBias, kMask, kSlopes, kNumSaved };

OpArguments restore(const AutogradContext& context, const variable_list& saved) {
  const auto& data = context.saved_data;
  return {.sink = optional(saved[kSink]),
          .bias = optional(saved[kBias]),
          .attn_mask = optional(saved[kMask]),
          .slopes = optional(saved[kSlopes]),
          .seed = {},
          .spec = data.at("spec").toSymIntVector(),
          .tables = {saved.begin() + kNumSaved, saved.end()},
          .scale = data.at("scale").toDouble(),
          .layout = data.at("layout").toStringRef(),
          .num_heads = data.at("num_heads").toSymInt(),
          .group_name = data.at("group_name").toStringRef(),
          .schedule = data.at("schedule").toStringRef(),
          .exchange = data.at("exchange").toStringRef(),
          .assume_agreed = data.at("assume_agreed").toBool(),
          .softcap = data.at("softcap").toDouble(),
          .dropout_p = data.at("dropout_p").toDouble(),
          .places = data.at("places").toSymIntVector(),
          .batch_groups = data.at("batch_groups").to<NameList>(),
          .head_groups = data.at("head_groups").to<NameList>()};
}

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static variable_list forward(AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value,
                               const std::optional<Tensor>& sink, const std::optional<Tensor>& bias,
                               const OpArguments& arguments, bool needs_grad) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const ForwardResult result = call_attention_forward(query, key, value, arguments, needs_grad);
    variable_list saved = {query,
                           key,
                           value,
                           result.out,
                           result.lse,
                           result.call,
                           sink.value_or(Tensor()),
                           bias.value_or(Tensor()),
                           arguments.attn_mask.value_or(Tensor()),
                           arguments.slopes.value_or(Tensor())};
    saved.insert(saved.end(), arguments.tables.begin(), arguments.tables.end());
    context->save_for_backward(std::move(saved));
    // A gradient that nobody asked for stays undefined instead of becoming zeros.
    context->set_materialize_grads(false);
    save(*context, arguments);
    return {result.out, result.max, result.sum, result.lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "ringspan::attention has no second derivative; call backward() without create_graph=True");
    // Before the guard: a checkpoint computes the forward again here, with autograd.
    const variable_list saved = context->get_saved_variables();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const OpArguments arguments = restore(*context, saved);
    // Gradients are asked for by the place among the tensors that were given.
    const size_t bias_place = arguments.sink ? 4 : 3;
    const bool sink_wanted = arguments.sink && context->needs_input_grad(3);
    const bool bias_wanted = arguments.bias && context->needs_input_grad(bias_place);
    BackwardResult result = call_attention_backward(
        saved[kQuery], saved[kKey], saved[kValue], arguments,
        {saved[kOut], saved[kLse], saved[kCall], optional(gradients[0]), optional(gradients[3])}, bias_wanted);
    const auto needed = [&](bool wanted, Tensor& gradient) { return wanted ? std::move(gradient) : Tensor(); };
    return {needed(context->needs_input_grad(0), result.query),
            needed(context->needs_input_grad(1), result.key),
            needed(context->needs_input_grad(2), result.value),
            needed(sink_wanted, result.sink),
            needed(bias_wanted, result.bias),
            Tensor(),
            Tensor()};
  }
};

AttentionResult attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const std::optional<Tensor>& sink, c10::SymIntArrayRef spec, at::TensorList tables,
                          double scale, string layout, c10::SymInt num_heads, string group_name, string schedule,
                          string exchange, bool assume_agreed, const std::optional<Tensor>& bias,
                          const std::optional<Tensor>& attn_mask, const std::optional<Tensor>& slopes,
                          const std::optional<Tensor>& seed, double softcap, double dropout_p,
                          c10::SymIntArrayRef places, NameList batch_groups, NameList head_groups) {
  const auto differentiable = [](const std::optional<Tensor>& tensor) { return tensor && tensor->requires_grad(); };
  const bool needs_grad =
      at::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() || value.requires_grad() ||
                                     differentiable(sink) || differentiable(bias));
  const OpArguments arguments{.sink = sink,
                              .bias = bias,
                              .attn_mask = attn_mask,
                              .slopes = slopes,
                              .seed = seed,
                              .spec = spec.vec(),
                              .tables = tables.vec(),
                              .scale = scale,
                              .layout = std::move(layout),
                              .num_heads = std::move(num_heads),
                              .group_name = std::move(group_name),
                              .schedule = std::move(schedule),
                              .exchange = std::move(exchange),
                              .assume_agreed = assume_agreed,
                              .softcap = softcap,
                              .dropout_p = dropout_p,
                              .places = places.vec(),
                              .batch_groups = std::move(batch_groups),
                              .head_groups = std::move(head_groups)};
  const variable_list results = AttentionFunction::apply(query, key, value, sink, bias, arguments, needs_grad);
  // Detached here rather than marked as non-differentiable in the function: compiled autograd fails on the latter.
  return {results[0], results[1].detach(), results[2].detach(), results[3]};
}

using Signature = AttentionResult(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                                  c10::SymIntArrayRef, at::TensorList, double, string, c10::SymInt, string, string,
                                  string, bool, const std::optional<Tensor>&, const std::optional<Tensor>&,
                                  const std::optional<Tensor>&, const std::optional<Tensor>&, double, double,
                                  c10::SymIntArrayRef, NameList, NameList);

// kDevice: whose autocast state counts.
template <at::DeviceType kDevice>
AttentionResult attention_autocast(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const std::optional<Tensor>& sink, c10::SymIntArrayRef spec, at::TensorList tables,
                                   double scale, string layout, c10::SymInt num_heads, string group_name,
                                   string schedule, string exchange, bool assume_agreed,
                                   const std::optional<Tensor>& bias, const std::optional<Tensor>& attn_mask,
                                   const std::optional<Tensor>& slopes, const std::optional<Tensor>& seed,
                                   double softcap, double dropout_p, c10::SymIntArrayRef places, NameList batch_groups,
                                   NameList head_groups) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("ringspan::attention", "").typed<Signature>();
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const auto cast = [dtype = at::autocast::get_autocast_dtype(kDevice)](const Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, kDevice);
  };
  // What enters the softmax stays as it is.
  return op.call(cast(query), cast(key), cast(value), sink, spec, tables, scale, std::move(layout),
                 std::move(num_heads), std::move(group_name), std::move(schedule), std::move(exchange), assume_agreed,
                 bias, attn_mask, slopes, seed, softcap, dropout_p, places, std::move(batch_groups),
                 std::move(head_groups));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? sink, SymInt[] spec, Tensor[] tables, float scale, "
      "str layout, SymInt num_heads, str group_name, str schedule, str exchange, bool assume_agreed, "
      "Tensor? bias=None, Tensor? attn_mask=None, Tensor? slopes=None, Tensor? seed=None, float softcap=0.0, "
      "float dropout_p=0.0, SymInt[] places=[], str[]? batch_groups=None, str[]? head_groups=None) -> (Tensor out, "
      "Tensor max, Tensor sum, Tensor lse)",
      tags);
}

TORCH_LIBRARY_IMPL(ringspan, CompositeImplicitAutograd, m) { m.impl("attention", &attention); }
TORCH_LIBRARY_IMPL(ringspan, AutocastCPU, m) { m.impl("attention", &attention_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(ringspan, AutocastCUDA, m) { m.impl("attention", &attention_autocast<at::kCUDA>); }
TORCH_LIBRARY_IMPL(ringspan, AutocastPrivateUse1, m) { m.impl("attention", &attention_autocast<at::kPrivateUse1>); }

}  // namespace ringspan::binding
