#include "binding/plan_question.h"

#include <vector>

#include "binding/call.h"

namespace ringspan::binding {

Decoded decode_arguments(at::IntArrayRef spec, at::TensorList tables) {
  std::vector<at::Tensor> kept;
  return decode(description_of(spec, tables, kept));
}

Problem problem_of(const Decoded& decoded, int64_t q_heads, int64_t kv_heads, int64_t qk_dim, int64_t v_dim,
                   const std::string& dtype, double scale, const std::string& layout) {
  return {.batch = decoded.batch,
          .q_heads = q_heads,
          .kv_heads = kv_heads,
          .q_len = decoded.q_len,
          .kv_len = decoded.kv_len,
          .qk_dim = qk_dim,
          .v_dim = v_dim,
          .dtype = parse_dtype(dtype),
          .layout = parse_layout(layout),
          .scale = scale};
}

PlanQuestion ask_plan(at::IntArrayRef spec, at::TensorList tables, int64_t q_heads, int64_t kv_heads, int64_t qk_dim,
                      int64_t v_dim, const std::string& dtype, double scale, const std::string& layout,
                      const std::string& schedule, const std::string& exchange) {
  const Decoded decoded = decode_arguments(spec, tables);
  const Problem problem = problem_of(decoded, q_heads, kv_heads, qk_dim, v_dim, dtype, scale, layout);
  const Exchange kind = parse_exchange(exchange);
  return {build_plan(problem, decoded.mask, decoded.q_map, decoded.kv_map, parse_schedule_name(schedule),
                     route_of(kind, decoded.world)),
          kind};
}

}  // namespace ringspan::binding
