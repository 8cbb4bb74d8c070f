// The two opaque ops behind every version of the contract. No random number is drawn in here, and no gradient is
// recorded.
#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "binding/npu/arguments.h"

namespace ringspan::binding {

// ringspan::_contract_forward
struct ContractForwardCall {
  at::Tensor query, key, value;
  ContractArguments arguments;
  bool needs_grad = false;  // a backward will follow
  bool wants_pse = false;   // with the gradient of pse

  static void fields(auto& self, auto&& visit) {
    visit(FieldInfo{"query"}, self.query);
    visit(FieldInfo{"key"}, self.key);
    visit(FieldInfo{"value"}, self.value);
    ContractArguments::fields(self.arguments, visit);
    visit(FieldInfo{"needs_grad", "False"}, self.needs_grad);
    visit(FieldInfo{"wants_pse", "False"}, self.wants_pse);
  }
};

struct ContractResult {
  at::Tensor out, max, sum;
  at::Tensor softmax_out;  // [0], the contract's fourth result
  // int64 [1], those that were used: in a group the seed of its rank 0.
  at::Tensor seed, offset;
  // What the backward of a call on DTensors takes: this rank's parts of out, max and sum (saving DTensors would cost an
  // op on DTensors for each), and the maps that were chosen, [0] if none, whatever is in effect then. Else empty.
  std::vector<at::Tensor> kept;
};
// Through the dispatcher.
ContractResult call_contract_forward(const ContractForwardCall& call);

// ringspan::_contract_backward
struct ContractBackwardCall {
  at::Tensor query, key, value, dy;
  std::optional<at::Tensor> max, sum, out;
  bool are_parts = false;  // the three are ContractResult::kept
  ContractArguments arguments;

  static void fields(auto& self, auto&& visit) {
    visit(FieldInfo{"query"}, self.query);
    visit(FieldInfo{"key"}, self.key);
    visit(FieldInfo{"value"}, self.value);
    visit(FieldInfo{"dy"}, self.dy);
    visit(FieldInfo{"softmax_max"}, self.max);
    visit(FieldInfo{"softmax_sum"}, self.sum);
    visit(FieldInfo{"attention_in"}, self.out);
    visit(FieldInfo{"are_parts"}, self.are_parts);
    ContractArguments::fields(self.arguments, visit);
  }
};

struct ContractOpGradients {
  at::Tensor dq, dk, dv;
  at::Tensor dpse, dsink;  // [0] without pse, without sink
};
ContractOpGradients call_contract_backward(const ContractBackwardCall& call);

}  // namespace ringspan::binding
