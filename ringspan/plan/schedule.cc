#include "ringspan/plan/schedule.h"

#include <array>
#include <charconv>
#include <utility>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

constexpr std::array<std::pair<ScheduleKind, std::string_view>, 8> kNames{{{ScheduleKind::kRing, "ring"},
                                                                           {ScheduleKind::kGather, "gather"},
                                                                           {ScheduleKind::kUlysses, "ulysses"},
                                                                           {ScheduleKind::kHybrid, "hybrid"},
                                                                           {ScheduleKind::kPruned, "pruned"},
                                                                           {ScheduleKind::kQRing, "q_ring"},
                                                                           {ScheduleKind::kDoubleRing, "double_ring"},
                                                                           {ScheduleKind::kInvariant, "invariant"}}};

bool has_inner(ScheduleKind kind) { return kind == ScheduleKind::kHybrid || kind == ScheduleKind::kDoubleRing; }

std::string_view plain_name(ScheduleKind kind) {
  for (const auto& [known, name] : kNames) {
    if (known == kind) return name;
  }
  throw Error(concat("schedule ", static_cast<int>(kind), " is unknown"));
}

}  // namespace

std::string name_of(const Schedule& schedule) {
  const std::string name(plain_name(schedule.kind));
  if (!has_inner(schedule.kind)) return name;
  return schedule.outer == 0 ? concat(name, ":", schedule.inner)
                             : concat(name, ":", schedule.inner, "x", schedule.outer);
}

namespace {

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

Schedule parse_schedule(std::string_view text) {
  const size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  for (const auto& [kind, known] : kNames) {
    if (known != name || has_inner(kind) != (colon != std::string_view::npos)) continue;
    Schedule schedule{kind};
    if (!has_inner(kind) || read_numbers(text.substr(colon + 1), schedule)) return schedule;
  }
  throw Error(concat("schedule \"", text, "\" is unknown; use ring, gather, ulysses, hybrid:N (N ranks split heads), ",
                     "pruned, q_ring, invariant or double_ring:N (N ranks a node)"));
}

bool moves_queries(const Schedule& schedule) {
  return schedule.kind == ScheduleKind::kUlysses || schedule.kind == ScheduleKind::kHybrid ||
         schedule.kind == ScheduleKind::kQRing || schedule.kind == ScheduleKind::kInvariant;
}

bool fixes_order(const Schedule& schedule) { return schedule.kind == ScheduleKind::kInvariant; }

void check_schedule(const Schedule& schedule, int64_t world) {
  plain_name(schedule.kind);
  if (!has_inner(schedule.kind)) return;
  RINGSPAN_CHECK(schedule.inner >= 1 && world % schedule.inner == 0, "schedule ", name_of(schedule), " for a group of ",
                 world, " ranks: ", schedule.inner, " must divide ", world);
  RINGSPAN_CHECK(schedule.outer == 0 || schedule.inner * schedule.outer == world, "schedule ", name_of(schedule),
                 " is for ", schedule.inner * schedule.outer, " ranks, the group has ", world);
}

std::vector<Schedule> schedules_for(int64_t world) {
  std::vector<Schedule> schedules = {Schedule::kRing,   Schedule::kGather, Schedule::kUlysses,
                                     Schedule::kPruned, Schedule::kQRing,  Schedule::kInvariant};
  for (int64_t inner = 2; inner < world; ++inner) {
    if (world % inner != 0) continue;
    schedules.push_back(Schedule::hybrid(inner));
    schedules.push_back(Schedule::double_ring(inner));
  }
  return schedules;
}

}  // namespace ringspan
