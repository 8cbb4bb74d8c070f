// The attention contract of npu_fusion_attention v3 (and v1, v2), on CPU tensors: its arguments, its checks, and what
// they mean to the core. Everything in here throws Error; the ops turn it into RuntimeError, as the contract asks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ringspan/shape/problem.h"

#include "binding/pair_arguments.h"

namespace ringspan::binding {

// How pse enters the scores. v1 and v3 know only the second.
enum class PseType : int64_t { kAfterScale = 0, kBeforeScale = 1, kSlopes = 2, kRootSlopes = 3 };

// As the ops are given them. Forward and grad take the same.
struct ContractArguments {
  int64_t head_num = 0;
  std::string input_layout;
  std::optional<at::Tensor> pse, padding_mask, atten_mask;
  double scale = 1, keep_prob = 1;
  int64_t pre_tokens = 0, next_tokens = 0, inner_precise = 0;
  std::optional<std::vector<int64_t>> prefix;
  // Running ends of the documents, without a leading 0; empty = not given.
  std::optional<std::vector<int64_t>> q_ends, kv_ends;
  int64_t sparse_mode = 0;
  std::string softmax_layout;
  std::optional<at::Tensor> sink;
  PseType pse_type = PseType::kBeforeScale;
  int64_t slope_shift = 0;  // kv_start - q_start
};

// Sizes of one call; lengths are those of this process's tensors.
struct ContractSizes {
  Layout layout = Layout::kBNSD;
  int64_t batch = 1, q_heads = 1, kv_heads = 1, q_rows = 0, kv_rows = 0, qk_dim = 0, v_dim = 0;
};

// A document's place among the tokens. One that is empty on a side has length 0 there.
struct Document {
  int64_t q_begin, q_len, kv_begin, kv_len;
};

// A checked call in the core's terms.
struct ContractCall {
  ContractSizes sizes;
  int64_t q_len = 0, kv_len = 0;      // global
  std::vector<Document> documents{};  // TND
  std::vector<int64_t> mask_words{};  // the mask program of a spec; its tables are counted from 0
  std::vector<at::Tensor> tables{};
  PairArguments pairs{};
};

// "bnsd" is BNSD.
Layout parse_contract_layout(const std::string& input_layout);

// Sizes out of the shapes; Error where they do not fit together (contract 2.2).
ContractSizes read_contract_sizes(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                  int64_t head_num, const std::string& input_layout);

// Checks that need no values: numbers, dtypes, the shapes of pse, atten_mask and sink. `q_len`, `kv_len`: global.
void check_contract(const ContractArguments& arguments, const ContractSizes& sizes, at::ScalarType dtype, int64_t q_len,
                    int64_t kv_len);

// Everything: the checks above and those of lengths, prefix and tokens.
ContractCall read_contract(const ContractArguments& arguments, const ContractSizes& sizes, at::ScalarType dtype,
                           int64_t q_len, int64_t kv_len);

// The ends in a 1-D integer tensor on the CPU.
std::vector<int64_t> read_ends(const char* name, const at::Tensor& ends);

// Parts of read_contract; contract_mask.cc.
std::vector<Document> read_documents(const std::vector<int64_t>& q_ends, const std::vector<int64_t>& kv_ends,
                                     int64_t q_len, int64_t kv_len);
void check_tokens(const ContractArguments& arguments, const ContractSizes& sizes, int64_t q_len, int64_t kv_len,
                  const std::vector<Document>& documents);
void fill_mask(const ContractArguments& arguments, int64_t q_len, int64_t kv_len, ContractCall& call);

}  // namespace ringspan::binding
