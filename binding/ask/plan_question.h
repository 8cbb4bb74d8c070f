// What the ops ask about plans: the arguments of Python's `plan`, checked by building it.
#pragma once

#include <string>
#include <vector>

#include "ringspan/plan/exchange.h"
#include "ringspan/plan/plan.h"

#include "binding/base/record.h"
#include "binding/op/decode.h"

namespace ringspan::binding {

// Sizes are those of the whole sequences.
struct PlanArguments {
  std::vector<c10::SymInt> spec;
  std::vector<at::Tensor> tables;
  int64_t q_heads = 1, kv_heads = 1, qk_dim = 1, v_dim = 1;
  std::string dtype;
  double scale = 1;
  std::string layout, schedule, exchange;

  static void fields(auto& self, auto&& visit) {
    visit(FieldInfo{"spec"}, self.spec);
    visit(FieldInfo{"tables"}, self.tables);
    visit(FieldInfo{"q_heads"}, self.q_heads);
    visit(FieldInfo{"kv_heads"}, self.kv_heads);
    visit(FieldInfo{"qk_dim"}, self.qk_dim);
    visit(FieldInfo{"v_dim"}, self.v_dim);
    visit(FieldInfo{"dtype"}, self.dtype);
    visit(FieldInfo{"scale"}, self.scale);
    visit(FieldInfo{"layout"}, self.layout);
    visit(FieldInfo{"schedule"}, self.schedule);
    visit(FieldInfo{"exchange"}, self.exchange);
  }
};

// A plan, and what is asked of it beside.
struct RankQuestion {
  PlanArguments plan;
  int64_t rank = 0;  // -1: of all ranks

  static void fields(auto& self, auto&& visit) {
    PlanArguments::fields(self.plan, visit);
    visit(FieldInfo{"rank"}, self.rank);
  }
};

Decoded decode_arguments(at::IntArrayRef spec, at::TensorList tables);

// Of the whole call that `decoded` describes.
Problem problem_of(const Decoded& decoded, const PlanArguments& arguments);

struct PlanQuestion {
  Plan plan;
  Exchange exchange;
};
PlanQuestion ask_plan(const PlanArguments& arguments);

}  // namespace ringspan::binding
