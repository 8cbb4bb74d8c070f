// What the ops ask about plans: the arguments of Python's `plan`, checked by building it.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/ATen.h>

#include "ringspan/plan/exchange.h"
#include "ringspan/plan/plan.h"

#include "binding/decode.h"

namespace ringspan::binding {

Decoded decode_arguments(at::IntArrayRef spec, at::TensorList tables);

// Of the whole call that `decoded` describes.
Problem problem_of(const Decoded& decoded, int64_t q_heads, int64_t kv_heads, int64_t qk_dim, int64_t v_dim,
                   const std::string& dtype, double scale, const std::string& layout);

struct PlanQuestion {
  Plan plan;
  Exchange exchange;
};

PlanQuestion ask_plan(at::IntArrayRef spec, at::TensorList tables, int64_t q_heads, int64_t kv_heads, int64_t qk_dim,
                      int64_t v_dim, const std::string& dtype, double scale, const std::string& layout,
                      const std::string& schedule, const std::string& exchange);

// Those of ask_plan, in an op's schema.
inline constexpr const char* kPlanArguments =
    "SymInt[] spec, Tensor[] tables, int q_heads, int kv_heads, int qk_dim, int v_dim, str dtype, float scale, "
    "str layout, str schedule, str exchange";

}  // namespace ringspan::binding
