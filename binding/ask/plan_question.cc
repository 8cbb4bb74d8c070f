#include "binding/ask/plan_question.h"

#include "binding/op/call.h"

namespace ringspan::binding {

Decoded decode_arguments(at::IntArrayRef spec, at::TensorList tables) { return DescribedPattern(spec, tables).build(); }

Problem problem_of(const Decoded& decoded, const PlanArguments& a) {
  return {.batch = decoded.batch,
          .q_heads = a.q_heads,
          .kv_heads = a.kv_heads,
          .q_len = decoded.q_len,
          .kv_len = decoded.kv_len,
          .qk_dim = a.qk_dim,
          .v_dim = a.v_dim,
          .dtype = parse_dtype(a.dtype),
          .layout = parse_layout(a.layout),
          .scale = a.scale};
}

PlanQuestion ask_plan(const PlanArguments& a) {
  const Decoded decoded = decode_arguments(numbers_of(a.spec), a.tables);
  const Exchange exchange = parse_exchange(a.exchange);
  const Schedule schedule = parse_schedule_name(a.schedule, exchange);
  check_exchange(exchange, schedule);
  return {build_plan(problem_of(decoded, a), decoded.mask, decoded.q_map, decoded.kv_map, schedule,
                     route_of(exchange, decoded.world)),
          exchange};
}

}  // namespace ringspan::binding
