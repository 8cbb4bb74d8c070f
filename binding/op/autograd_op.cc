// ringspan::attention, the public op: autograd over the two inner ops, and autocast.
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>

#include "binding/base/boxed_op.h"
#include "binding/base/saved_record.h"
#include "binding/base/tensors.h"
#include "binding/op/inner_ops.h"

namespace ringspan::binding {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using AttentionResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // out, max, sum, lse

std::optional<Tensor> optional(const Tensor& tensor) { return tensor.defined() ? std::optional(tensor) : std::nullopt; }

// The order of the saved tensors; those of the arguments follow.
enum Saved : size_t { kQuery, kKey, kValue, kOut, kLse, kCall, kNumSaved };

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static variable_list forward(AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value,
                               const std::optional<Tensor>& /*sink*/, const std::optional<Tensor>& /*bias*/,
                               ForwardCall forward) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const ForwardResult result = call_attention_forward(forward);
    variable_list saved = {query, key, value, result.out, result.lse, result.call};
    Arguments& arguments = forward.call.arguments;
    arguments.seed.reset();  // it is settled, and in `call`
    arguments.seed_is_drawn = false;
    save_record(arguments, *context, saved);
    context->save_for_backward(std::move(saved));
    // A gradient that nobody asked for stays undefined instead of becoming zeros.
    context->set_materialize_grads(false);
    return {result.out, result.max, result.sum, result.lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "ringspan::attention has no second derivative; call backward() without create_graph=True");
    // Before the guard: a checkpoint computes the forward again here, with autograd.
    const variable_list saved = context->get_saved_variables();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    BackwardCall backward{
        .grad_out = optional(gradients[0]),
        .grad_lse = optional(gradients[3]),
        .out = saved[kOut],
        .lse = saved[kLse],
        .number = saved[kCall],
        .call = {saved[kQuery], saved[kKey], saved[kValue], restore_record<Arguments>(*context, saved, kNumSaved)}};
    const Arguments& arguments = backward.call.arguments;
    // Gradients are asked for by the place among the tensors that were given.
    const bool sink_wanted = arguments.sink && context->needs_input_grad(3);
    backward.wants_bias = arguments.bias && context->needs_input_grad(arguments.sink ? 4 : 3);
    BackwardResult result = call_attention_backward(backward);
    const auto needed = [&](bool wanted, Tensor& gradient) { return wanted ? std::move(gradient) : Tensor(); };
    return {needed(context->needs_input_grad(0), result.query), needed(context->needs_input_grad(1), result.key),
            needed(context->needs_input_grad(2), result.value), needed(sink_wanted, result.sink),
            needed(backward.wants_bias, result.bias),           Tensor()};
  }
};

AttentionResult attention(const AttentionCall& call) {
  const Arguments& a = call.arguments;
  ForwardCall forward{.call = call, .wants_bias = wants_gradient(a.bias)};
  forward.needs_grad = wants_gradient(call.query) || wants_gradient(call.key) || wants_gradient(call.value) ||
                       wants_gradient(a.sink) || forward.wants_bias;
  const variable_list results =
      AttentionFunction::apply(call.query, call.key, call.value, a.sink, a.bias, std::move(forward));
  // Detached here rather than marked as non-differentiable in the function: compiled autograd fails on the latter.
  return {results[0], results[1].detach(), results[2].detach(), results[3]};
}

// kDevice: whose autocast state counts.
template <at::DeviceType kDevice>
void attention_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  AttentionCall call = pop_record<AttentionCall>(*stack);
  // What enters the softmax stays as it is.
  for (Tensor* tensor : {&call.query, &call.key, &call.value}) {
    *tensor = at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), *tensor, kDevice);
  }
  push_record(call, *stack);
  op.callBoxed(stack);
}

template <at::DeviceType kDevice>
torch::CppFunction autocast() {
  return torch::CppFunction::makeFromBoxedFunction<&attention_autocast<kDevice>>();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  m.def(boxed_schema<AttentionCall>("attention", "(Tensor out, Tensor max, Tensor sum, Tensor lse)").c_str(),
        {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(ringspan, CompositeImplicitAutograd, m) { m.impl("attention", boxed<AttentionCall, &attention>()); }
TORCH_LIBRARY_IMPL(ringspan, AutocastCPU, m) { m.impl("attention", autocast<at::kCPU>()); }
TORCH_LIBRARY_IMPL(ringspan, AutocastCUDA, m) { m.impl("attention", autocast<at::kCUDA>()); }
TORCH_LIBRARY_IMPL(ringspan, AutocastPrivateUse1, m) { m.impl("attention", autocast<at::kPrivateUse1>()); }

}  // namespace ringspan::binding
