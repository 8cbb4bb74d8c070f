// The attention contract of npu_fusion_attention v3 (and v1, v2), on CPU tensors: its arguments, its checks, and what
// they mean to the core. Everything in here throws Error; the ops turn it into RuntimeError, as the contract asks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ringspan/mask/mask_spec.h"
#include "ringspan/shape/problem.h"

#include "binding/npu/arguments.h"
#include "binding/op/pair_arguments.h"

namespace ringspan::binding {

// Sizes of one call; lengths are those of this process's tensors.
struct ContractSizes {
  Layout layout = Layout::kBNSD;
  int64_t batch = 1, q_heads = 1, kv_heads = 1, q_rows = 0, kv_rows = 0, qk_dim = 0, v_dim = 0;
};

// A document's place among the tokens. One that is empty on a side has length 0 there.
struct Document {
  int64_t q_begin, q_len, kv_begin, kv_len;
};

// What a sparse mode keeps: everything, or with a prefix for each batch entry what mode 6 does, or bands.
struct ContractMask {
  enum class Kind { kFull, kPrefix, kBands } kind = Kind::kFull;
  std::vector<int64_t> prefix{};
  std::vector<Band> bands{};

  MaskSpec build(int64_t q_len, int64_t kv_len) const;
};

// A checked call in the core's terms.
struct ContractCall {
  ContractSizes sizes;
  int64_t q_len = 0, kv_len = 0;      // global
  std::vector<Document> documents{};  // TND
  ContractMask mask{};
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

// The prefix in numbers.
std::optional<std::vector<int64_t>> read_prefix(const ContractArguments& arguments);

// The ends in a 1-D integer tensor on the CPU.
std::vector<int64_t> read_ends(const char* name, const at::Tensor& ends);

// Parts of read_contract; contract_mask.cc.
std::vector<Document> read_documents(const std::vector<int64_t>& q_ends, const std::vector<int64_t>& kv_ends,
                                     int64_t q_len, int64_t kv_len);
void check_tokens(const ContractArguments& arguments, const ContractSizes& sizes, int64_t q_len, int64_t kv_len,
                  const std::vector<Document>& documents);
void fill_mask(const ContractArguments& arguments, int64_t q_len, int64_t kv_len, ContractCall& call);

}  // namespace ringspan::binding
