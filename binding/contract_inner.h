// The two opaque ops behind every version of the contract: the arguments of all of them at once. No random number is
// drawn in here, and no gradient is recorded.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

namespace ringspan::binding {

struct ContractOpArguments {
  int64_t head_num = 0;
  std::string input_layout;
  std::optional<at::Tensor> pse, padding_mask, atten_mask;
  double scale = 1, keep_prob = 1;
  int64_t pre_tokens = 0, next_tokens = 0, inner_precise = 0;
  std::optional<std::vector<c10::SymInt>> prefix;
  std::optional<at::Tensor> q_ends, kv_ends;
  int64_t sparse_mode = 0;
  std::string softmax_layout;
  std::optional<at::Tensor> sink;
  int64_t pse_type = 1, slope_shift = 0;
  std::optional<at::Tensor> seed, offset;  // one integer each, needed where keep_prob < 1
  bool in_group = false;
  std::string group_name;
  std::optional<at::Tensor> q_map, kv_map;
  std::string schedule = "auto", exchange = "auto";
  std::optional<c10::List<std::string>> batch_groups, head_groups;  // as OpArguments has them
};

struct ContractOpResult {
  at::Tensor out, max, sum;
  at::Tensor softmax_out;  // [0], the contract's fourth result
  // int64 [1], those that were used: in a group the seed of its rank 0.
  at::Tensor seed, offset;
  // What the backward of a call on DTensors takes: this rank's parts of out, max and sum (saving DTensors would cost an
  // op on DTensors for each), and the maps that were chosen, [0] if none, whatever is in effect then. Else empty.
  std::vector<at::Tensor> kept;
};
ContractOpResult call_contract_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                       const ContractOpArguments& arguments);

struct ContractOpSaved {
  at::Tensor dy;
  std::optional<at::Tensor> max, sum, out;
  bool are_parts = false;  // the three are ContractOpResult::kept
};
struct ContractOpGradients {
  at::Tensor dq, dk, dv;
  at::Tensor dpse, dsink;  // [0] without pse, without sink
};
ContractOpGradients call_contract_backward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                           const ContractOpSaved& saved, const ContractOpArguments& arguments);

}  // namespace ringspan::binding
