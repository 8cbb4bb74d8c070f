// One call of the contract's ops, run: with or without a group.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "binding/base/errors.h"
#include "binding/npu/inner.h"

namespace ringspan::binding {

// The results of the op.
using ContractForwardTuple =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, std::vector<at::Tensor>>;
ContractForwardTuple run_contract(const ContractForwardCall& call);
using ContractBackwardTuple = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
ContractBackwardTuple run_contract_backward(const ContractBackwardCall& call);

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
