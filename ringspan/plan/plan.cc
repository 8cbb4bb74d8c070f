#include "ringspan/plan/plan.h"

#include <algorithm>
#include <utility>

#include "ringspan/base/error.h"
#include "ringspan/plan/ring.h"

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

int64_t head_dim_of(Payload payload, const Problem& problem) {
  switch (payload) {
    case Payload::kQ:
    case Payload::kK:
    case Payload::kDq:
    case Payload::kDk: return problem.qk_dim;
    case Payload::kV:
    case Payload::kOut:
    case Payload::kDout:
    case Payload::kDv: return problem.v_dim;
    case Payload::kStats:
    case Payload::kDelta: return 1;
  }
  throw Error(concat("payload ", static_cast<int>(payload), " is unknown"));
}

bool is_accumulated(Payload payload) {
  return payload == Payload::kStats || payload == Payload::kDelta || payload == Payload::kDq ||
         payload == Payload::kDk || payload == Payload::kDv;
}

int64_t sent_by(int64_t rank, const std::vector<Step>& steps, const Problem& problem) {
  int64_t bytes = 0;
  for (const Step& step : steps) {
    for (const auto* transfers : {&step.before, &step.after}) {
      for (const Transfer& transfer : *transfers) {
        if (transfer.src == rank) bytes += bytes_of(transfer, problem);
      }
    }
  }
  return bytes;
}

}  // namespace

const char* name_of(Schedule schedule) {
  switch (schedule) {
    case Schedule::kRing: return "ring";
  }
  throw Error(concat("schedule ", static_cast<int>(schedule), " is unknown"));
}

Schedule parse_schedule(std::string_view name) {
  if (name == name_of(Schedule::kRing)) return Schedule::kRing;
  throw Error(concat("schedule \"", name, "\" is unknown; use ring"));
}

std::vector<std::vector<RowRange>> padding_of(const ShardMap& map, int64_t rank) {
  std::vector<std::vector<RowRange>> lists(map.num_lists());
  for (int64_t batch = 0; batch < map.num_lists(); ++batch) {
    int64_t row = 0;
    for (const Segment& segment : map.segments(rank, batch)) {
      if (segment.local_row > row) lists[batch].push_back({row, segment.local_row});
      row = segment.local_row + segment.length;
    }
    if (row < map.local_rows(rank)) lists[batch].push_back({row, map.local_rows(rank)});
  }
  return lists;
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
  part.q_padding = padding_of(q_map_, rank);
  detail::build_ring(*this, part);
  return part;
}

Plan build_plan(const Problem& problem, const MaskSpec& mask, const ShardMap& q_map, const ShardMap& kv_map,
                Schedule schedule, GradRoute grad_route) {
  problem.check();
  name_of(schedule);
  check_length("mask", mask.q_len(), "q_len", problem.q_len);
  check_length("mask", mask.kv_len(), "kv_len", problem.kv_len);
  check_length("query shard map", q_map.seq_len(), "q_len", problem.q_len);
  check_length("K/V shard map", kv_map.seq_len(), "kv_len", problem.kv_len);
  RINGSPAN_CHECK(q_map.world() == kv_map.world(), "plan: the query shard map has ", q_map.world(),
                 " ranks and the K/V shard map ", kv_map.world(), "; build both for the same group");
  check_lists("mask", mask.num_lists(), problem.batch);
  check_lists("query shard map", q_map.num_lists(), problem.batch);
  check_lists("K/V shard map", kv_map.num_lists(), problem.batch);
  for (int64_t batch = 0; batch < kv_map.num_lists(); ++batch) {
    const std::optional<int64_t> hole = kv_map.first_hole(batch);
    RINGSPAN_CHECK(!hole, "plan: no rank holds K/V position ", hole.value_or(0), " of batch entry ", batch,
                   "; a K/V shard map must cover all of 0..", problem.kv_len - 1);
  }
  return Plan(problem, mask, q_map, kv_map, schedule, grad_route);
}

Plan build_plan(const Problem& problem, const MaskSpec& mask, const ShardMap& map, Schedule schedule) {
  return build_plan(problem, mask, map, map, schedule);
}

int64_t bytes_of(const Transfer& transfer, const Problem& problem) {
  const DType dtype = is_accumulated(transfer.payload) ? accumulator_of(problem.dtype) : problem.dtype;
  return transfer.num_rows() * (transfer.head_end - transfer.head_begin) * (transfer.batch_end - transfer.batch_begin) *
         head_dim_of(transfer.payload, problem) * size_of(dtype);
}

SentBytes sent_bytes(const RankPlan& part) {
  return {.forward = sent_by(part.rank, part.forward, part.problem),
          .backward = sent_by(part.rank, part.backward, part.problem)};
}

}  // namespace ringspan
