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
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using AttentionResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // out, max, sum, lse

// All arguments of a call but query, key, value and sink.
struct Options {
  std::vector<c10::SymInt> spec;
  std::vector<Tensor> tables;
  double scale = 1;
  string layout;
  c10::SymInt num_heads;
  string group_name, schedule, exchange;
  bool assume_agreed = false;
  bool needs_grad = false;
};

void save(AutogradContext& context, const Options& options) {
  auto& data = context.saved_data;
  data["spec"] = c10::IValue(c10::SymIntArrayRef(options.spec));
  data["scale"] = options.scale;
  data["layout"] = options.layout;
  data["num_heads"] = c10::IValue(options.num_heads);
  data["group_name"] = options.group_name;
  data["schedule"] = options.schedule;
  data["exchange"] = options.exchange;
  data["assume_agreed"] = options.assume_agreed;
}

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static variable_list forward(AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value,
                               const std::optional<Tensor>& sink, const Options& options) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [out, max, sum, lse, number] = call_attention_forward(
        query, key, value, sink, options.spec, options.tables, options.scale, options.layout, options.num_heads,
        options.group_name, options.schedule, options.exchange, options.assume_agreed, options.needs_grad);
    variable_list saved = {query, key, value, out, lse, number, sink.value_or(Tensor())};
    saved.insert(saved.end(), options.tables.begin(), options.tables.end());
    context->save_for_backward(std::move(saved));
    // A gradient that nobody asked for stays undefined instead of becoming zeros.
    context->set_materialize_grads(false);
    save(*context, options);
    return {out, max, sum, lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "ringspan::attention has no second derivative; call backward() without create_graph=True");
    // Before the guard: a checkpoint computes the forward again here, with autograd.
    const variable_list saved = context->get_saved_variables();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto& data = context->saved_data;
    const std::vector<c10::SymInt> spec = data["spec"].toSymIntVector();
    const std::vector<Tensor> tables(saved.begin() + 7, saved.end());
    const auto optional = [](const Tensor& tensor) { return tensor.defined() ? std::optional(tensor) : std::nullopt; };
    auto [dq, dk, dv, dsink] = call_attention_backward(
        optional(gradients[0]), optional(gradients[3]), saved[0], saved[1], saved[2], optional(saved[6]), saved[3],
        saved[4], saved[5], spec, tables, data["scale"].toDouble(), data["layout"].toStringRef(),
        data["num_heads"].toSymInt(), data["group_name"].toStringRef(), data["schedule"].toStringRef(),
        data["exchange"].toStringRef(), data["assume_agreed"].toBool());
    const auto needed = [&](size_t input, Tensor& gradient) {
      return context->needs_input_grad(input) ? std::move(gradient) : Tensor();
    };
    const bool sink_needed = saved[6].defined() && context->needs_input_grad(3);
    return {needed(0, dq), needed(1, dk), needed(2, dv), sink_needed ? std::move(dsink) : Tensor(), Tensor()};
  }
};

AttentionResult attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const std::optional<Tensor>& sink, c10::SymIntArrayRef spec, at::TensorList tables,
                          double scale, string layout, c10::SymInt num_heads, string group_name, string schedule,
                          string exchange, bool assume_agreed) {
  const bool needs_grad = at::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() ||
                                                         value.requires_grad() || (sink && sink->requires_grad()));
  const Options options{.spec = spec.vec(),
                        .tables = tables.vec(),
                        .scale = scale,
                        .layout = std::move(layout),
                        .num_heads = std::move(num_heads),
                        .group_name = std::move(group_name),
                        .schedule = std::move(schedule),
                        .exchange = std::move(exchange),
                        .assume_agreed = assume_agreed,
                        .needs_grad = needs_grad};
  const variable_list results = AttentionFunction::apply(query, key, value, sink, options);
  // Detached here rather than marked as non-differentiable in the function: compiled autograd fails on the latter.
  return {results[0], results[1].detach(), results[2].detach(), results[3]};
}

AttentionResult attention_autocast(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const std::optional<Tensor>& sink, c10::SymIntArrayRef spec, at::TensorList tables,
                                   double scale, string layout, c10::SymInt num_heads, string group_name,
                                   string schedule, string exchange, bool assume_agreed) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ringspan::attention", "")
                             .typed<AttentionResult(const Tensor&, const Tensor&, const Tensor&,
                                                    const std::optional<Tensor>&, c10::SymIntArrayRef, at::TensorList,
                                                    double, string, c10::SymInt, string, string, string, bool)>();
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  const auto cast = [dtype = at::autocast::get_autocast_dtype(at::kCPU)](const Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, at::kCPU);
  };
  // The sink stays in fp32, as softmax does.
  return op.call(cast(query), cast(key), cast(value), sink, spec, tables, scale, std::move(layout),
                 std::move(num_heads), std::move(group_name), std::move(schedule), std::move(exchange), assume_agreed);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? sink, SymInt[] spec, Tensor[] tables, float scale, "
      "str layout, "
      "SymInt num_heads, str group_name, str schedule, str exchange, bool assume_agreed) -> "
      "(Tensor out, Tensor max, Tensor sum, Tensor lse)",
      tags);
}

TORCH_LIBRARY_IMPL(ringspan, CompositeImplicitAutograd, m) { m.impl("attention", &attention); }
TORCH_LIBRARY_IMPL(ringspan, AutocastCPU, m) { m.impl("attention", &attention_autocast); }

}  // namespace ringspan::binding
