// The arguments of every version of the contract at once (docs/npu_ops.md), as its two opaque ops take them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "binding/base/record.h"

namespace ringspan::binding {

// How pse enters the scores. v1 and v3 know only the second.
enum class PseType : int64_t { kAfterScale = 0, kBeforeScale = 1, kSlopes = 2, kRootSlopes = 3 };

struct ContractArguments {
  int64_t head_num = 0;
  std::string input_layout;
  std::optional<at::Tensor> pse, padding_mask, atten_mask;
  double scale = 1, keep_prob = 1;
  int64_t pre_tockens = 0, next_tockens = 0, inner_precise = 0;
  std::optional<std::vector<c10::SymInt>> prefix;
  // Running ends of the documents, without a leading 0.
  std::optional<at::Tensor> q_ends, kv_ends;
  int64_t sparse_mode = 0;
  std::string softmax_layout;
  std::optional<at::Tensor> sink;
  int64_t pse_type = 1;
  int64_t slope_shift = 0;                 // kv_start - q_start
  std::optional<at::Tensor> seed, offset;  // one integer each, needed where keep_prob < 1
  bool in_group = false;                   // one of the overloads .cp, or DTensors that share out the sequence
  std::string group_name;
  // int64 [n, 6] rows of (batch list, rank, local row, begin, length, stride), as ShardMap.to_tensor() makes them: a
  // row of rank -1 gives the sequence length as its `length`, one of length 0 the number of local rows of its rank as
  // its local row. Absent = contiguous and equal.
  std::optional<at::Tensor> q_map, kv_map;
  std::string schedule = "auto", exchange = "auto";
  std::optional<NameList> batch_groups, head_groups;  // as Arguments has them

  PseType type_of_pse() const { return static_cast<PseType>(pse_type); }
  bool has_slopes() const { return pse && pse_type >= static_cast<int64_t>(PseType::kSlopes); }

  static void fields(auto& self, auto&& visit) {
    constexpr auto kNever = Compare::kNever, kValue = Compare::kValue, kContent = Compare::kContent,
                   kGiven = Compare::kGiven;
    constexpr auto kHost = DtypeRule::kHost;
    visit(FieldInfo{"head_num"}, self.head_num);
    visit(FieldInfo{"input_layout"}, self.input_layout);
    visit(FieldInfo{"pse", "None", kGiven}, self.pse);
    visit(FieldInfo{"padding_mask", "None", kGiven}, self.padding_mask);
    visit(FieldInfo{"atten_mask", "None", kGiven}, self.atten_mask);
    visit(FieldInfo{"scale", "1.0", kValue}, self.scale);
    visit(FieldInfo{"keep_prob", "1.0", kValue}, self.keep_prob);
    visit(FieldInfo{"pre_tockens", "0", kValue}, self.pre_tockens);
    visit(FieldInfo{"next_tockens", "0", kValue}, self.next_tockens);
    visit(FieldInfo{"inner_precise", "0"}, self.inner_precise);
    visit(FieldInfo{"prefix", "None", kValue}, self.prefix);
    visit(FieldInfo{"actual_seq_qlen", "None", kContent, kHost}, self.q_ends);
    visit(FieldInfo{"actual_seq_kvlen", "None", kContent, kHost}, self.kv_ends);
    visit(FieldInfo{"sparse_mode", "0", kValue}, self.sparse_mode);
    visit(FieldInfo{"softmax_layout", "\"\"", kValue}, self.softmax_layout);
    visit(FieldInfo{"sink", "None", kContent, DtypeRule::kAccumulator}, self.sink);
    visit(FieldInfo{"pse_type", "1", kValue}, self.pse_type);
    visit(FieldInfo{"slope_shift", "0", kValue}, self.slope_shift);
    visit(FieldInfo{"seed", "None", kNever, kHost}, self.seed);
    visit(FieldInfo{"offset", "None", kNever, kHost}, self.offset);
    visit(FieldInfo{"in_group", "False"}, self.in_group);
    visit(FieldInfo{"group_name", "\"\""}, self.group_name);
    visit(FieldInfo{"q_map", "None", kNever, kHost}, self.q_map);
    visit(FieldInfo{"kv_map", "None", kNever, kHost}, self.kv_map);
    visit(FieldInfo{"schedule", "\"auto\""}, self.schedule);
    visit(FieldInfo{"exchange", "\"auto\""}, self.exchange);
    visit(FieldInfo{"batch_groups", "None"}, self.batch_groups);
    visit(FieldInfo{"head_groups", "None"}, self.head_groups);
  }
};

}  // namespace ringspan::binding
