// build_plan: checks that a question fits together, and answers it by the builder of its schedule.
#include "ringspan/base/error.h"
#include "ringspan/plan/plan.h"
#include "ringspan/plan/schedules/builder.h"
#include "ringspan/plan/schedules/schedules.h"

namespace ringspan {
namespace {

void check_lists(const char* what, int64_t num_lists, int64_t batch) {
  RINGSPAN_CHECK(num_lists == 1 || num_lists == batch, "plan: the ", what, " has ", num_lists,
                 " batch entries and the problem ", batch, "; give one list per batch entry, or a single one for all");
}

void check_length(const char* what, int64_t length, const char* field, int64_t expected) {
  RINGSPAN_CHECK(length == expected, "plan: the ", what, " has ", length, " positions and the problem's ", field,
                 " is ", expected, "; build both for the same sequence");
}

}  // namespace

RankPlan Plan::rank(int64_t rank) const {
  RINGSPAN_CHECK(0 <= rank && rank < world(), "plan: rank is ", rank, "; the world has ", world(),
                 " ranks, counted from 0");
  RankPlan part;
  part.rank = rank;
  part.world = world();
  part.schedule = schedule_;
  part.grad_route = grad_route_;
  part.problem = problem_;
  for (int64_t other = 0; other < world(); ++other) {
    part.q_rows.push_back(q_map_.local_rows(other));
    part.kv_rows.push_back(kv_map_.local_rows(other));
  }
  part.heads = {{.q_end = problem_.q_heads, .kv_end = problem_.kv_heads}};
  part.q_padding = detail::padding_of(detail::rows_of(q_map_, rank));
  detail::build_steps(*this, part);
  return part;
}

Plan build_plan(const Problem& problem, const MaskSpec& mask, const ShardMap& q_map, const ShardMap& kv_map,
                const Schedule& schedule, GradRoute grad_route) {
  problem.check();
  check_length("mask", mask.q_len(), "q_len", problem.q_len);
  check_length("mask", mask.kv_len(), "kv_len", problem.kv_len);
  check_length("query shard map", q_map.seq_len(), "q_len", problem.q_len);
  check_length("K/V shard map", kv_map.seq_len(), "kv_len", problem.kv_len);
  RINGSPAN_CHECK(q_map.world() == kv_map.world(), "plan: the query shard map has ", q_map.world(),
                 " ranks and the K/V shard map ", kv_map.world(), "; build both for the same group");
  check_schedule(schedule, q_map.world());
  check_lists("mask", mask.num_lists(), problem.batch);
  check_lists("query shard map", q_map.num_lists(), problem.batch);
  check_lists("K/V shard map", kv_map.num_lists(), problem.batch);
  for (int64_t batch = 0; batch < kv_map.num_lists(); ++batch) {
    const std::optional<int64_t> hole = kv_map.first_hole(batch);
    RINGSPAN_CHECK(!hole, "plan: no rank holds K/V position ", hole.value_or(0), " of batch entry ", batch,
                   "; a K/V shard map must cover all of 0..", problem.kv_len - 1);
  }
  if (fixes_order(schedule)) detail::check_invariant(problem, q_map);
  return Plan(problem, mask, q_map, kv_map, schedule, grad_route);
}

Plan build_plan(const Problem& problem, const MaskSpec& mask, const ShardMap& map, const Schedule& schedule) {
  return build_plan(problem, mask, map, map, schedule);
}

}  // namespace ringspan
