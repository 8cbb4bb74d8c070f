// One call of the contract's ops, run: with or without a group.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>

#include "binding/contract.h"
#include "binding/contract_stats.h"
#include "binding/errors.h"
#include "binding/group.h"

namespace ringspan::binding {

// What the .cp overloads add. Without a group: one rank that holds everything.
struct ContractGroup {
  std::string group_name;
  // int64 [n, 6] rows of (batch list, rank, local row, begin, length, stride), as ShardMap.to_tensor() makes them: a
  // row of rank -1 gives the sequence length as its `length`, one of length 0 the number of local rows of its rank as
  // its local row. Absent = contiguous and equal.
  std::optional<at::Tensor> q_map, kv_map;
  std::string schedule = "auto", exchange = "auto";
  bool is_given = false;
  Share batch_share{}, head_share{};  // of the call that prefix and dropout count batch entries and heads of
};

struct ContractForward {
  at::Tensor out, max, sum;
  int64_t seed;  // that the ranks agreed on
};
ContractForward run_contract(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             const ContractArguments& arguments, const ContractGroup& group, int64_t seed,
                             int64_t offset);

struct ContractSaved {
  at::Tensor dy, max, sum, out;
};
struct ContractGradients {
  at::Tensor dq, dk, dv;
  at::Tensor dpse;   // undefined without pse
  at::Tensor dsink;  // [0] without sink
};
ContractGradients run_contract_backward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                        const ContractArguments& arguments, const ContractGroup& group,
                                        const ContractSaved& saved, int64_t seed, int64_t offset);

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
