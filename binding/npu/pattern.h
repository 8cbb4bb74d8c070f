// The mask and the maps of a contract call.
#pragma once

#include <optional>
#include <vector>

#include "binding/npu/contract.h"
#include "binding/op/pattern.h"

namespace ringspan::binding {

// A map as the contract's ops are given it (ContractArguments::q_map).
class ContractMap {
 public:
  // Error naming the map where the tensor is none. Without one: equal contiguous parts of `own_rows` rows.
  ContractMap(const char* name, const std::optional<at::Tensor>& map, int64_t own_rows, int64_t world);

  int64_t seq_len() const { return seq_len_; }
  const std::vector<int64_t>& words() const { return words_; }
  ShardMap build() const;

 private:
  int64_t world_, seq_len_;
  bool is_given_ = false;
  std::vector<int64_t> words_;  // local rows of each rank, then six numbers for each segment
};

class ContractPattern final : public Pattern {
 public:
  ContractPattern(const ContractCall& call, ContractMap q_map, ContractMap kv_map, int64_t world);

  SpecSizes sizes() const override { return sizes_; }
  void append_content(std::vector<int64_t>& words) const override;
  Decoded build() const override;
  Fields describe() const override;

 private:
  SpecSizes sizes_;
  ContractMask mask_;
  ContractMap q_map_, kv_map_;
};

}  // namespace ringspan::binding
