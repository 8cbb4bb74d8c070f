#include "ringspan/plan/schedule.h"

#include <charconv>

#include "ringspan/base/error.h"
#include "ringspan/base/words.h"
#include "ringspan/plan/schedules/schedules.h"

namespace ringspan {
namespace {

// All that is known of a schedule beside its file.
struct ScheduleInfo {
  ScheduleKind kind;
  std::string_view name;
  std::string_view inner;  // what its inner number counts; "" = it has none
  bool moves_queries, fixes_order;
  void (*build)(const Plan& plan, RankPlan& part);
};

constexpr std::string_view kTeams = "ranks split heads", kNodes = "ranks a node";
constexpr ScheduleInfo kSchedules[] = {
    // kind, name, inner, moves_queries, fixes_order, build
    {ScheduleKind::kRing, "ring", "", false, false, detail::build_ring},
    {ScheduleKind::kGather, "gather", "", false, false, detail::build_gather},
    {ScheduleKind::kUlysses, "ulysses", "", true, false, detail::build_ulysses},
    {ScheduleKind::kHybrid, "hybrid", kTeams, true, false, detail::build_hybrid},
    {ScheduleKind::kPruned, "pruned", "", false, false, detail::build_pruned},
    {ScheduleKind::kQRing, "q_ring", "", true, false, detail::build_q_ring},
    {ScheduleKind::kDoubleRing, "double_ring", kNodes, false, false, detail::build_double_ring},
    {ScheduleKind::kInvariant, "invariant", "", true, true, detail::build_invariant},
};

const ScheduleInfo& info_of(ScheduleKind kind) {
  for (const ScheduleInfo& info : kSchedules) {
    if (info.kind == kind) return info;
  }
  throw Error(concat("schedule ", static_cast<int>(kind), " is unknown"));
}

bool has_inner(const ScheduleInfo& info) { return !info.inner.empty(); }

// "2" or "2x4" after the colon; false for anything else.
bool read_numbers(std::string_view text, Schedule& schedule) {
  const char* const end = text.data() + text.size();
  const auto [next, fault] = std::from_chars(text.data(), end, schedule.inner);
  if (fault != std::errc() || next == end) return fault == std::errc();
  if (*next != 'x') return false;
  const auto [last, outer_fault] = std::from_chars(next + 1, end, schedule.outer);
  return outer_fault == std::errc() && last == end && schedule.outer >= 1;
}

}  // namespace

std::string name_of(const Schedule& schedule) {
  const ScheduleInfo& info = info_of(schedule.kind);
  std::string name(info.name);
  if (has_inner(info)) name += concat(":", schedule.inner);
  if (has_inner(info) && schedule.outer != 0) name += concat("x", schedule.outer);
  return name;
}

Schedule parse_schedule(std::string_view text) {
  const size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  for (const ScheduleInfo& info : kSchedules) {
    if (info.name != name || has_inner(info) != (colon != std::string_view::npos)) continue;
    Schedule schedule{info.kind};
    if (!has_inner(info) || read_numbers(text.substr(colon + 1), schedule)) return schedule;
  }
  throw Error(concat("schedule \"", text, "\" is unknown; use ", schedule_help()));
}

std::vector<ScheduleName> schedule_names() {
  std::vector<ScheduleName> names;
  for (const ScheduleInfo& info : kSchedules) names.push_back({info.name, info.inner});
  return names;
}

std::string schedule_help() {
  std::vector<std::string> names;
  for (const ScheduleInfo& info : kSchedules) {
    names.push_back(has_inner(info) ? concat(info.name, ":N (N ", info.inner, ")") : std::string(info.name));
  }
  return any_of(names);
}

bool moves_queries(const Schedule& schedule) { return info_of(schedule.kind).moves_queries; }

bool fixes_order(const Schedule& schedule) { return info_of(schedule.kind).fixes_order; }

void check_schedule(const Schedule& schedule, int64_t world) {
  if (!has_inner(info_of(schedule.kind))) return;
  RINGSPAN_CHECK(schedule.inner >= 1 && world % schedule.inner == 0, "schedule ", name_of(schedule), " for a group of ",
                 world, " ranks: ", schedule.inner, " must divide ", world);
  RINGSPAN_CHECK(schedule.outer == 0 || schedule.inner * schedule.outer == world, "schedule ", name_of(schedule),
                 " is for ", schedule.inner * schedule.outer, " ranks, the group has ", world);
}

std::vector<Schedule> schedules_for(int64_t world) {
  std::vector<Schedule> schedules;
  for (const ScheduleInfo& info : kSchedules) {
    if (!has_inner(info)) schedules.push_back({info.kind});
  }
  for (int64_t inner = 2; inner < world; ++inner) {
    for (const ScheduleInfo& info : kSchedules) {
      if (has_inner(info) && world % inner == 0) schedules.push_back({info.kind, inner});
    }
  }
  return schedules;
}

void detail::build_steps(const Plan& plan, RankPlan& part) { info_of(plan.schedule().kind).build(plan, part); }

}  // namespace ringspan
