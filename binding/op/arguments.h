// The arguments of attention beside query, key and value, and those of the ops that share them. A new number is a line
// in Arguments::fields and, where the kernels read it, a member of PairInputs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ringspan/kernel/pair_inputs.h"

#include "binding/base/record.h"

namespace ringspan::binding {

struct Arguments {
  // Masks and maps in words (docs/decisions/call-description.md).
  std::vector<c10::SymInt> spec;
  std::vector<at::Tensor> tables;
  double scale = 1;
  std::string layout;
  c10::SymInt num_heads = 1;
  std::optional<std::string> group_name;  // none: the caller gave no group; "": this process alone
  std::string schedule = "auto", exchange = "auto";
  bool assume_agreed = false, return_stats = false;
  bool map_is_default = false;  // the caller gave no shard map
  std::string place;            // where the program made the call, for the flight record; "" unknown
  std::optional<at::Tensor> sink, bias, attn_mask, slopes;
  std::optional<at::Tensor> seed;  // int64 [1]
  bool seed_is_drawn = false;      // by each rank: the one of rank 0 is taken
  PairInputs inputs{};             // of these the numbers alone
  c10::SymInt offset = 0, batch_offset = 0, head_offset = 0, total_heads = 0, slope_shift = 0;
  // Groups over which the batch entries and the heads of the described call are spread, outermost first: read at run
  // time, so that a traced graph holds no rank.
  std::optional<NameList> batch_groups, head_groups;

  static void fields(auto& self, auto&& visit) {
    visit(FieldInfo{"spec"}, self.spec);
    visit(FieldInfo{"tables", nullptr, Compare::kNever, DtypeRule::kHost}, self.tables);
    visit(FieldInfo{"scale", nullptr, Compare::kValue}, self.scale);
    visit(FieldInfo{"layout"}, self.layout);
    visit(FieldInfo{"num_heads"}, self.num_heads);
    visit(FieldInfo{"group_name", "None"}, self.group_name);
    visit(FieldInfo{"schedule", "\"auto\""}, self.schedule);
    visit(FieldInfo{"exchange", "\"auto\""}, self.exchange);
    visit(FieldInfo{"assume_agreed", "False"}, self.assume_agreed);
    visit(FieldInfo{"return_stats", "False", Compare::kValue}, self.return_stats);
    visit(FieldInfo{"map_is_default", "False"}, self.map_is_default);
    visit(FieldInfo{"place", "\"\""}, self.place);
    visit(FieldInfo{"sink", "None", Compare::kContent, DtypeRule::kAccumulator}, self.sink);
    visit(FieldInfo{"bias", "None", Compare::kGiven, DtypeRule::kWidens}, self.bias);
    visit(FieldInfo{"attn_mask", "None", Compare::kGiven, DtypeRule::kBool}, self.attn_mask);
    visit(FieldInfo{"slopes", "None", Compare::kContent, DtypeRule::kAccumulator}, self.slopes);
    visit(FieldInfo{"seed", "None", Compare::kNever, DtypeRule::kHost}, self.seed);
    visit(FieldInfo{"seed_is_drawn", "False"}, self.seed_is_drawn);
    visit(FieldInfo{"softcap", "0.0", Compare::kValue}, self.inputs.numbers.softcap);
    visit(FieldInfo{"dropout_p", "0.0", Compare::kValue}, self.inputs.dropout.p);
    visit(FieldInfo{"offset", "0", Compare::kValue}, self.offset);
    visit(FieldInfo{"batch_offset", "0", Compare::kValue}, self.batch_offset);
    visit(FieldInfo{"head_offset", "0", Compare::kValue}, self.head_offset);
    visit(FieldInfo{"total_heads", "0", Compare::kValue}, self.total_heads);
    visit(FieldInfo{"slope_shift", "0", Compare::kValue}, self.slope_shift);
    visit(FieldInfo{"batch_groups", "None"}, self.batch_groups);
    visit(FieldInfo{"head_groups", "None"}, self.head_groups);
  }
};

// ringspan::attention
struct AttentionCall {
  at::Tensor query, key, value;
  Arguments arguments;

  static void fields(auto& self, auto&& visit) {
    visit(FieldInfo{"query"}, self.query);
    visit(FieldInfo{"key"}, self.key);
    visit(FieldInfo{"value"}, self.value);
    Arguments::fields(self.arguments, visit);
  }
};

// ringspan::attention_forward
struct ForwardCall {
  AttentionCall call;
  bool needs_grad = false;  // a backward will follow
  bool wants_bias = false;  // with the gradient of the bias

  static void fields(auto& self, auto&& visit) {
    AttentionCall::fields(self.call, visit);
    visit(FieldInfo{"needs_grad", "False"}, self.needs_grad);
    visit(FieldInfo{"wants_bias", "False"}, self.wants_bias);
  }
};

// ringspan::attention_backward: what the forward gave, and what flows back into it.
struct BackwardCall {
  std::optional<at::Tensor> grad_out, grad_lse;
  at::Tensor out, lse;
  at::Tensor number;  // int64 [2]: the forward's number in its group (0 where nothing was agreed), the seed it used
  AttentionCall call;
  bool wants_bias = false;

  static void fields(auto& self, auto&& visit) {
    visit(FieldInfo{"grad_out"}, self.grad_out);
    visit(FieldInfo{"grad_lse"}, self.grad_lse);
    visit(FieldInfo{"out"}, self.out);
    visit(FieldInfo{"lse"}, self.lse);
    visit(FieldInfo{"call"}, self.number);
    AttentionCall::fields(self.call, visit);
    visit(FieldInfo{"wants_bias", "False"}, self.wants_bias);
  }
};

}  // namespace ringspan::binding
