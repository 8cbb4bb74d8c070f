#include "ringspan/plan/plan.h"

#include <utility>

#include "ringspan/base/error.h"
#include "ringspan/plan/builder.h"
#include "ringspan/plan/double_ring.h"
#include "ringspan/plan/gather.h"
#include "ringspan/plan/invariant.h"
#include "ringspan/plan/pruned.h"
#include "ringspan/plan/ring.h"
#include "ringspan/plan/ulysses.h"

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

int64_t sent_bytes_of(const std::vector<Step>& steps, const RankPlan& part) {
  int64_t bytes = 0;
  for (const Step& step : steps) bytes += sent_bytes(step, part);
  return bytes;
}

void build_steps(const Plan& plan, RankPlan& part) {
  const Schedule& schedule = plan.schedule();
  switch (schedule.kind) {
    case ScheduleKind::kRing: return detail::build_ring(plan, part);
    case ScheduleKind::kGather: return detail::build_gather(plan, part);
    case ScheduleKind::kUlysses: return detail::build_ulysses(plan, part, plan.world());
    case ScheduleKind::kHybrid: return detail::build_ulysses(plan, part, schedule.inner);
    case ScheduleKind::kPruned: return detail::build_pruned(plan, part);
    case ScheduleKind::kQRing: return detail::build_q_ring(plan, part);
    case ScheduleKind::kDoubleRing: return detail::build_double_ring(plan, part, schedule.inner);
    case ScheduleKind::kInvariant: return detail::build_invariant(plan, part);
  }
}

}  // namespace

HeadRange heads_of(Payload payload, const Problem& problem, const Operand& operand) {
  const int64_t side = is_of_kv(payload) ? problem.kv_heads : problem.q_heads;
  const int64_t heads = size_of(payload, problem).heads;
  if (heads == side) return {operand.head_begin, operand.head_end};
  return {0, operand.head_begin < operand.head_end ? 1 : 0};
}

bool moves_queries(const RankPlan& part) {
  for (const auto* steps : {&part.forward, &part.backward}) {
    for (const Step& step : *steps) {
      for (const auto* transfers : {&step.before, &step.after}) {
        for (const Transfer& transfer : *transfers) {
          if (transfer.payload == Payload::kQ) return true;
        }
      }
    }
  }
  return false;
}

bool sums_at_home(const RankPlan& part, Payload gradient) {
  const bool of_kv = is_of_kv(gradient);
  for (const Step& step : part.backward) {
    if (step.computes && (of_kv ? step.dkv : step.dq).slot == kOwnSlot) return true;
    for (const Transfer& transfer : step.after) {
      const bool comes_home = transfer.dst == part.rank && transfer.to.slot == kOwnSlot;
      if (comes_home && transfer.payload == gradient && transfer.adds) return true;
    }
  }
  return false;
}

Plan::Plan(Problem problem, MaskSpec mask, ShardMap q_map, ShardMap kv_map, Schedule schedule, GradRoute grad_route)
    : problem_(std::move(problem)),
      mask_(std::move(mask)),
      q_map_(std::move(q_map)),
      kv_map_(std::move(kv_map)),
      schedule_(schedule),
      grad_route_(grad_route) {}

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
  build_steps(*this, part);
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

int64_t RankPlan::num_q_heads() const {
  int64_t count = 0;
  for (const HeadBlock& block : heads) count += block.q_end - block.q_begin;
  return count;
}

int64_t sent_bytes(const Step& step, const RankPlan& part) {
  int64_t bytes = 0;
  for (const auto* transfers : {&step.before, &step.after}) {
    for (const Transfer& transfer : *transfers) {
      if (transfer.src == part.rank && transfer.is_sent()) bytes += bytes_of(transfer, part.problem);
    }
  }
  return bytes;
}

SentBytes sent_bytes(const RankPlan& part) {
  return {.forward = sent_bytes_of(part.forward, part), .backward = sent_bytes_of(part.backward, part)};
}

}  // namespace ringspan
