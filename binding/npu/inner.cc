#include "binding/npu/inner.h"

#include <string>
#include <utility>

#include <ATen/ATen.h>

#include "ringspan/base/error.h"

#include "binding/base/boxed_op.h"
#include "binding/base/tensor_rules.h"
#include "binding/base/tensors.h"
#include "binding/npu/call.h"
#include "binding/npu/contract.h"
#include "binding/op/agreed_call.h"

namespace ringspan::binding {
namespace {

using at::Tensor;
using std::string;

ContractForwardTuple forward(const ContractForwardCall& call) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return contract_errors([&] { return run_contract(call); });
}

ContractBackwardTuple backward(const ContractBackwardCall& call) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return contract_errors([&] { return run_contract_backward(call); });
}

bool is_symbolic(const Tensor& tensor) { return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides(); }

// The checks that need no values, where all sizes are numbers.
template <class Call>
void check_shapes(const Call& call) {
  const ContractArguments& a = call.arguments;
  check_meta(call, a.group_name, false);
  if (a.in_group || is_symbolic(call.query) || is_symbolic(call.key) || is_symbolic(call.value)) return;
  const ContractSizes sizes = read_contract_sizes(call.query, call.key, call.value, a.head_num, a.input_layout);
  check_contract(a, sizes, call.query.scalar_type(), sizes.q_rows, sizes.kv_rows);
}

ContractForwardTuple forward_meta(const ContractForwardCall& call) {
  const auto& [query, key, value, a, needs_grad, wants_pse] = call;
  contract_errors([&] { check_shapes(call); });
  const Layout layout = contract_errors([&, &given = a.input_layout] { return parse_contract_layout(given); });
  const Axes axes = axes_of(layout);
  auto shape = query.sym_sizes().vec();
  if (axes.head >= 0) {
    shape.back() = value.sym_size(-1);
  } else {
    shape[2] = c10::SymInt(a.head_num) * (value.sym_size(2) / (key.sym_size(2) / (query.sym_size(2) / a.head_num)));
  }
  std::vector<c10::SymInt> stats = {axes.batch < 0 ? c10::SymInt(1) : query.sym_size(axes.batch), a.head_num,
                                    query.sym_size(axes.row), 8};
  if (layout == Layout::kTND) stats = {query.sym_size(0), a.head_num, 8};
  const auto wide = query.options().dtype(at::kFloat);
  const auto words = query.options().dtype(at::kLong);
  return {at::empty_symint(shape, query.options()),
          at::empty_symint(stats, wide),
          at::empty_symint(stats, wide),
          at::empty({0}, query.options()),
          at::empty({1}, words),
          at::empty({1}, words),
          {}};
}

ContractBackwardTuple backward_meta(const ContractBackwardCall& call) {
  contract_errors([&] { check_shapes(call); });
  const ContractArguments& a = call.arguments;
  return {empty_dense(call.query), empty_dense(call.key), empty_dense(call.value),
          a.pse ? empty_dense(*a.pse) : at::empty({0}, call.query.options()),
          a.sink ? empty_dense(*a.sink) : at::empty({0}, call.query.options().dtype(at::kFloat))};
}

}  // namespace

ContractResult call_contract_forward(const ContractForwardCall& call) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("ringspan::_contract_forward", "");
  torch::jit::Stack r = call_boxed(op, call);
  return {std::move(r[0]).toTensor(), std::move(r[1]).toTensor(), std::move(r[2]).toTensor(),
          std::move(r[3]).toTensor(), std::move(r[4]).toTensor(), std::move(r[5]).toTensor(),
          r[6].toTensorVector()};
}

ContractOpGradients call_contract_backward(const ContractBackwardCall& call) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("ringspan::_contract_backward", "");
  torch::jit::Stack r = call_boxed(op, call);
  return {std::move(r[0]).toTensor(), std::move(r[1]).toTensor(), std::move(r[2]).toTensor(),
          std::move(r[3]).toTensor(), std::move(r[4]).toTensor()};
}

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  for (const string prefix : {"_", "_visible_"}) {
    m.def(
        boxed_schema<ContractForwardCall>(prefix + "contract_forward",
                                          "(Tensor out, Tensor max, Tensor sum, Tensor softmax_out, Tensor used_seed, "
                                          "Tensor used_offset, Tensor[] kept)")
            .c_str(),
        tags);
    m.def(boxed_schema<ContractBackwardCall>(prefix + "contract_backward",
                                             "(Tensor dq, Tensor dk, Tensor dv, Tensor dpse, Tensor dsink)")
              .c_str(),
          tags);
  }
}

TORCH_LIBRARY_IMPL(ringspan, CompositeExplicitAutograd, m) {
  m.impl("_contract_forward", boxed<ContractForwardCall, &forward>());
  m.impl("_contract_backward", boxed<ContractBackwardCall, &backward>());
}

// As in inner_ops.cc: CommDebugMode counts the collectives through these.
TORCH_LIBRARY_IMPL(ringspan, CompositeImplicitAutograd, m) {
  m.impl("_visible_contract_forward", boxed<ContractForwardCall, &forward>());
  m.impl("_visible_contract_backward", boxed<ContractBackwardCall, &backward>());
}

TORCH_LIBRARY_IMPL(ringspan, Meta, m) {
  m.impl("_contract_forward", boxed<ContractForwardCall, &forward_meta>());
  m.impl("_contract_backward", boxed<ContractBackwardCall, &backward_meta>());
}

}  // namespace ringspan::binding
