// One call of the contract's ops, run: with or without a group.
#pragma once

#include <utility>

#include <ATen/core/Tensor.h>

#include "binding/base/errors.h"
#include "binding/npu/contract.h"
#include "binding/npu/stats.h"

namespace ringspan::binding {

struct ContractForward {
  at::Tensor out, max, sum;
  int64_t seed, offset;  // that were used: the ranks agreed on the seed
};
// needs_grad: a backward will follow, wants_pse: with the gradient of pse.
ContractForward run_contract(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             const ContractArguments& arguments, bool needs_grad, bool wants_pse);

struct ContractSaved {
  at::Tensor dy, max, sum, out;  // undefined = missing
};
struct ContractGradients {
  at::Tensor dq, dk, dv;
  at::Tensor dpse;   // undefined without pse
  at::Tensor dsink;  // [0] without sink
};
ContractGradients run_contract_backward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                        const ContractArguments& arguments, const ContractSaved& saved);

// The contract's errors are RuntimeErrors, whatever is wrong.
template <class Action>
auto contract_errors(Action&& action) -> decltype(action()) {
  try {
    return std::forward<Action>(action)();
  } catch (const Error& error) {
    TORCH_CHECK(false, error.what());
  } catch (const TransportError& error) {
    throw_peer_error(error.what());
  }
}

}  // namespace ringspan::binding
