#include "binding/op/inner_ops.h"

#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "binding/base/boxed_op.h"
#include "binding/base/errors.h"
#include "binding/base/tensor_rules.h"
#include "binding/base/tensors.h"
#include "binding/op/agreed_call.h"
#include "binding/op/run.h"

namespace ringspan::binding {
namespace {

using at::Tensor;
using std::string;
using OptionalTensor = std::optional<Tensor>;
using ForwardTuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using BackwardTuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

int64_t read_seed(const Tensor& seed) {
  RINGSPAN_CHECK(seed.scalar_type() == at::kLong && seed.numel() == 1 && seed.device().is_cpu(), "seed is ",
                 toString(seed.scalar_type()), " ", seed.sizes(), " on ", seed.device().str(),
                 "; it must be one int64 on the CPU");
  return seed.item<int64_t>();
}

PairArguments read_pairs(const Arguments& a) {
  PairArguments pairs{.bias = a.bias, .mask = a.attn_mask, .slopes = a.slopes, .inputs = a.inputs};
  pairs.inputs.slope_shift = number_of(a.slope_shift);
  pairs.offset = number_of(a.offset);
  pairs.batch_offset = number_of(a.batch_offset);
  pairs.head_offset = number_of(a.head_offset);
  pairs.total_heads = number_of(a.total_heads);
  pairs.seed_is_drawn = a.seed_is_drawn;
  return pairs;
}

// Looks at the record.
CallArguments read_call(const Arguments& a) {
  return {.pattern = std::make_shared<DescribedPattern>(numbers_of(a.spec), a.tables),
          .scale = a.scale,
          .layout = a.layout,
          .num_heads = number_of(a.num_heads),
          .schedule = a.schedule,
          .exchange = a.exchange,
          .assume_agreed = a.assume_agreed,
          .place = a.place,
          .sink = a.sink,
          .pairs = read_pairs(a),
          .batch_share = share_of(a.batch_groups),
          .head_share = share_of(a.head_groups),
          .map_is_default = a.map_is_default,
          .sign_record = [&a](Signature& signature) { signature.add_record(a); },
          .check_tensors = [&a](DType dtype) { check_tensors(a, dtype); }};
}

Group group_of(const Arguments& a, const Tensor& query) {
  if (!a.group_name) check_alone("attention");
  return find_group(a.group_name.value_or(""), query.device().type());
}

ForwardTuple attention_forward(const ForwardCall& forward) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& [query, key, value, a] = forward.call;
  const Group group = group_of(a, query);
  const PreparedCall prepared = tell_peers(group, a.assume_agreed, [&] {
    CallArguments arguments = read_call(a);
    arguments.needs_grad = forward.needs_grad;
    arguments.pairs.wants_bias_gradient = forward.wants_bias;
    RINGSPAN_CHECK(a.inputs.dropout.p == 0 || a.seed, "dropout_p is ", a.inputs.dropout.p, " and no seed was given");
    if (a.inputs.dropout.p != 0) arguments.pairs.seed = read_seed(*a.seed);
    PreparedCall checked = prepare(group, query, key, value, arguments);
    make_agreed(checked, arguments, CallKind::kForward, 0);
    return checked;
  });
  const int64_t number = prepared.live->number();
  const Output output =
      prepared.live->run([&] { return run_attention(*prepared.live, prepared.call, prepared.operands); });
  return ForwardTuple{output.out, output.max, output.sum, output.lse,
                      at::tensor({number, prepared.operands.seed}, query.options().dtype(at::kLong))};
}

void check_tensor_like(const char* name, const Tensor& tensor, at::IntArrayRef size, at::ScalarType dtype,
                       at::Device device) {
  RINGSPAN_CHECK(tensor.sizes() == size && tensor.scalar_type() == dtype && tensor.device() == device, name, " is ",
                 toString(tensor.scalar_type()), " ", tensor.sizes(), " on ", tensor.device().str(), "; it must be ",
                 toString(dtype), " ", size, " on ", device.str());
}

void check_saved(const Call& call, const BackwardCall& backward) {
  const Problem& p = call.problem();
  const at::Device device = backward.call.query.device();
  const int64_t rows = call.plan->q_rows[call.group.rank];
  const std::vector<int64_t> out_shape = shape_in(call.layout, p.batch, p.q_heads, rows, p.v_dim);
  const std::vector<int64_t> stats_shape = {p.batch, p.q_heads, rows};
  const at::ScalarType dtype = torch_dtype(p.dtype), accumulator = torch_dtype(accumulator_of(p.dtype));
  check_tensor_like("out", backward.out, out_shape, dtype, device);
  check_tensor_like("lse", backward.lse, stats_shape, accumulator, device);
  if (backward.grad_out) check_tensor_like("grad_out", *backward.grad_out, out_shape, dtype, device);
  if (backward.grad_lse) check_tensor_like("grad_lse", *backward.grad_lse, stats_shape, accumulator, device);
}

// The forward's number and seed.
std::pair<int64_t, int64_t> read_forward(const Tensor& call) {
  RINGSPAN_CHECK(call.scalar_type() == at::kLong && call.dim() == 1 && call.numel() == 2, "call is ",
                 toString(call.scalar_type()), " ", call.sizes(), "; it must be the Long [2] that the forward gave");
  const Tensor words = call.cpu().contiguous();
  return {words.const_data_ptr<int64_t>()[0], words.const_data_ptr<int64_t>()[1]};
}

BackwardTuple attention_backward(const BackwardCall& backward) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& [query, key, value, a] = backward.call;
  const Group group = group_of(a, query);
  const PreparedCall prepared = tell_peers(group, a.assume_agreed, [&] {
    const auto [number, seed] = read_forward(backward.number);
    CallArguments arguments = read_call(a);
    arguments.needs_grad = true;
    arguments.pairs.wants_bias_gradient = backward.wants_bias;
    arguments.pairs.seed = seed;
    arguments.pairs.seed_is_drawn = false;  // the forward's is settled
    std::vector<string> more;
    if (backward.grad_lse) more.emplace_back("the gradient of lse");
    PreparedCall checked = prepare(group, query, key, value, arguments, std::move(more));
    check_saved(checked.call, backward);
    make_agreed(checked, arguments, CallKind::kBackward, number);
    return checked;
  });
  const InputGradients gradients = prepared.live->run([&] {
    return run_attention_backward(
        *prepared.live, prepared.call, prepared.operands,
        {backward.out, backward.lse, backward.grad_out.value_or(Tensor()), backward.grad_lse.value_or(Tensor())},
        backward.wants_bias);
  });
  return BackwardTuple{gradients.query, gradients.key, gradients.value,
                       a.sink ? gradients.sink.to(a.sink->scalar_type()) : gradients.sink,
                       backward.wants_bias ? gradients.bias.to(a.bias->scalar_type()) : gradients.bias};
}

// Shapes only. The heads of K/V are on an axis of their own, or hidden in H = heads * dim.
std::vector<c10::SymInt> meta_out_shape(const AttentionCall& call, const Axes& axes) {
  const auto& [query, key, value, a] = call;
  TORCH_CHECK_VALUE(query.dim() == axes.dims && key.dim() == axes.dims && value.dim() == axes.dims,
                    "query, key and value have ", query.dim(), ", ", key.dim(), " and ", value.dim(),
                    " dimensions; layout ", a.layout, " has ", axes.dims);
  auto shape = query.sym_sizes().vec();
  if (axes.head < 0) {
    const c10::SymInt kv_heads = key.sym_size(2) / (query.sym_size(2) / a.num_heads);
    shape[2] = a.num_heads * (value.sym_size(2) / kv_heads);
  } else {
    shape.back() = value.sym_size(-1);
  }
  return shape;
}

ForwardTuple attention_forward_meta(const ForwardCall& forward) {
  const auto& [query, key, value, a] = forward.call;
  check_meta(forward, a.group_name.value_or(""), a.assume_agreed);
  const Axes axes = axes_of(parse_layout(a.layout));
  const c10::SymInt batch = axes.batch < 0 ? c10::SymInt(1) : query.sym_size(axes.batch);
  const auto accumulator = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const std::vector<c10::SymInt> stats_shape = {batch, a.num_heads, query.sym_size(axes.row)};
  const auto stats = [&, &options = query] {
    return at::empty_symint(stats_shape, options.options().dtype(accumulator));
  };
  return {at::empty_symint(meta_out_shape(forward.call, axes), query.options()), stats(), stats(), stats(),
          at::empty({2}, query.options().dtype(at::kLong))};
}

BackwardTuple attention_backward_meta(const BackwardCall& backward) {
  const auto& [query, key, value, a] = backward.call;
  check_meta(backward, a.group_name.value_or(""), a.assume_agreed);
  const auto none = [&] { return at::empty({0}, backward.lse.options()); };
  return {empty_dense(query), empty_dense(key), empty_dense(value), a.sink ? empty_dense(*a.sink) : none(),
          a.bias && backward.wants_bias ? empty_dense(*a.bias) : none()};
}

}  // namespace

ForwardResult call_attention_forward(const ForwardCall& call) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("ringspan::attention_forward", "");
  torch::jit::Stack results = call_boxed(op, call);
  return {std::move(results[0]).toTensor(), std::move(results[1]).toTensor(), std::move(results[2]).toTensor(),
          std::move(results[3]).toTensor(), std::move(results[4]).toTensor()};
}

BackwardResult call_attention_backward(const BackwardCall& call) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("ringspan::attention_backward", "");
  torch::jit::Stack results = call_boxed(op, call);
  return {std::move(results[0]).toTensor(), std::move(results[1]).toTensor(), std::move(results[2]).toTensor(),
          std::move(results[3]).toTensor(), std::move(results[4]).toTensor()};
}

// The twins named `_visible_*` run the same code in the caller's modes: CommDebugMode counts the collectives through
// them (python/ringspan/_ops.py).
TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  for (const string prefix : {"", "_visible_"}) {
    m.def(boxed_schema<ForwardCall>(prefix + "attention_forward",
                                    "(Tensor out, Tensor max, Tensor sum, Tensor lse, Tensor call)")
              .c_str(),
          tags);
    m.def(boxed_schema<BackwardCall>(prefix + "attention_backward",
                                     "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor dbias)")
              .c_str(),
          tags);
  }
}

TORCH_LIBRARY_IMPL(ringspan, CompositeExplicitAutograd, m) {
  m.impl("attention_forward", boxed<ForwardCall, kTranslated<&attention_forward>>());
  m.impl("attention_backward", boxed<BackwardCall, kTranslated<&attention_backward>>());
}

TORCH_LIBRARY_IMPL(ringspan, CompositeImplicitAutograd, m) {
  m.impl("_visible_attention_forward", boxed<ForwardCall, kTranslated<&attention_forward>>());
  m.impl("_visible_attention_backward", boxed<BackwardCall, kTranslated<&attention_backward>>());
}

TORCH_LIBRARY_IMPL(ringspan, Meta, m) {
  m.impl("attention_forward", boxed<ForwardCall, kTranslated<&attention_forward_meta>>());
  m.impl("attention_backward", boxed<BackwardCall, kTranslated<&attention_backward_meta>>());
}

}  // namespace ringspan::binding
