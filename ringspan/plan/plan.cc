#include "ringspan/plan/plan.h"

#include <utility>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

int64_t sent_bytes_of(const std::vector<Step>& steps, const RankPlan& part) {
  int64_t bytes = 0;
  for (const Step& step : steps) bytes += sent_bytes(step, part);
  return bytes;
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

bool moves_dq(const RankPlan& part) {
  const Step* first = nullptr;
  for (const Step& step : part.backward) {
    if (!step.computes || !step.dq.is_computed()) continue;
    if (first && (first->dq.slot != step.dq.slot || first->q.slot != step.q.slot)) return true;
    if (!first) first = &step;
  }
  return false;
}

const char* name_of(GradRoute route) { return route == GradRoute::kFromOwner ? "from_owner" : "from_next"; }

GradRoute parse_route(std::string_view name, std::string_view what) {
  for (const GradRoute route : {GradRoute::kFromOwner, GradRoute::kFromNext}) {
    if (name == name_of(route)) return route;
  }
  throw Error(concat(what, " \"", name, "\" is unknown; use from_owner or from_next"));
}

Plan::Plan(const Problem& problem, MaskSpec mask, ShardMap q_map, ShardMap kv_map, Schedule schedule,
           GradRoute grad_route)
    : problem_(problem),
      mask_(std::move(mask)),
      q_map_(std::move(q_map)),
      kv_map_(std::move(kv_map)),
      schedule_(schedule),
      grad_route_(grad_route) {}

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

int64_t kept_pairs(const Step& step) {
  int64_t pairs = 0;
  for (const Tile& tile : step.tiles) pairs += count_pairs(tile);
  return pairs;
}

SentBytes sent_bytes(const RankPlan& part) {
  return {.forward = sent_bytes_of(part.forward, part), .backward = sent_bytes_of(part.backward, part)};
}

}  // namespace ringspan
