#include "ringspan/plan/schedule.h"

#include <array>
#include <charconv>
#include <utility>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

constexpr std::array<std::pair<ScheduleKind, std::string_view>, 7> kNames{{{ScheduleKind::kRing, "ring"},
                                                                           {ScheduleKind::kGather, "gather"},
                                                                           {ScheduleKind::kUlysses, "ulysses"},
                                                                           {ScheduleKind::kHybrid, "hybrid"},
                                                                           {ScheduleKind::kPruned, "pruned"},
                                                                           {ScheduleKind::kQRing, "q_ring"},
                                                                           {ScheduleKind::kDoubleRing, "double_ring"}}};

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
  return has_inner(schedule.kind) ? concat(name, ":", schedule.inner) : name;
}

Schedule parse_schedule(std::string_view text) {
  const size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  for (const auto& [kind, known] : kNames) {
    if (known != name || has_inner(kind) != (colon != std::string_view::npos)) continue;
    Schedule schedule{kind};
    if (!has_inner(kind)) return schedule;
    const std::string_view number = text.substr(colon + 1);
    const auto [end, fault] = std::from_chars(number.data(), number.data() + number.size(), schedule.inner);
    if (fault == std::errc() && end == number.data() + number.size()) return schedule;
  }
  throw Error(concat("schedule \"", text, "\" is unknown; use ring, gather, ulysses, hybrid:N (N ranks split heads), ",
                     "pruned, q_ring or double_ring:N (N ranks a node)"));
}

bool moves_queries(const Schedule& schedule) {
  return schedule.kind == ScheduleKind::kUlysses || schedule.kind == ScheduleKind::kHybrid ||
         schedule.kind == ScheduleKind::kQRing;
}

void check_schedule(const Schedule& schedule, int64_t world) {
  plain_name(schedule.kind);
  if (!has_inner(schedule.kind)) return;
  RINGSPAN_CHECK(schedule.inner >= 1 && world % schedule.inner == 0, "schedule ", name_of(schedule), " for a group of ",
                 world, " ranks: ", schedule.inner, " must divide ", world);
}

std::vector<Schedule> schedules_for(int64_t world) {
  std::vector<Schedule> schedules = {Schedule::kRing, Schedule::kGather, Schedule::kUlysses, Schedule::kPruned,
                                     Schedule::kQRing};
  for (int64_t inner = 2; inner < world; ++inner) {
    if (world % inner != 0) continue;
    schedules.push_back(Schedule::hybrid(inner));
    schedules.push_back(Schedule::double_ring(inner));
  }
  return schedules;
}

}  // namespace ringspan
