// Schedule: which algorithm a plan follows. Each has a file of its own in plan/schedules, which opens with a worked
// grid, its messages and its bytes.
//
//   ring         K/V go round, gradients of K/V follow one step behind                              ring.cc
//   gather       all K/V come at once while a rank works on its own                                 gather.cc
//   ulysses      heads instead of rows are split while a rank computes                              ulysses.cc
//   hybrid       ulysses between neighbouring ranks, a ring between their teams                     ulysses.cc
//   pruned       rows of K/V go from their owner straight to the ranks that keep a pair with them   pruned.cc
//   q_ring       forward as ring; backward sends Q, dout, statistics and dQ round                   ring.cc
//   double_ring  a ring inside each node, and one between nodes that moves once per inner round     double_ring.cc
//   invariant    blocks of the sequence in ascending order: the same bits for any split             invariant.cc
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ringspan {

enum class ScheduleKind : uint8_t { kRing, kGather, kUlysses, kHybrid, kPruned, kQRing, kDoubleRing, kInvariant };

struct Schedule {
  ScheduleKind kind = ScheduleKind::kRing;
  // kHybrid: ranks that split heads; kDoubleRing: ranks of a node. Divides the number of ranks. Else 0.
  int64_t inner = 0;
  // What the number of ranks must be over `inner`; 0 = whatever it is.
  int64_t outer = 0;

  static const Schedule kRing, kGather, kUlysses, kPruned, kQRing, kInvariant;
  static constexpr Schedule hybrid(int64_t ulysses, int64_t ring = 0) { return {ScheduleKind::kHybrid, ulysses, ring}; }
  static constexpr Schedule double_ring(int64_t inner, int64_t outer = 0) {
    return {ScheduleKind::kDoubleRing, inner, outer};
  }

  bool operator==(const Schedule&) const = default;
};

inline constexpr Schedule Schedule::kRing{ScheduleKind::kRing};
inline constexpr Schedule Schedule::kGather{ScheduleKind::kGather};
inline constexpr Schedule Schedule::kUlysses{ScheduleKind::kUlysses};
inline constexpr Schedule Schedule::kPruned{ScheduleKind::kPruned};
inline constexpr Schedule Schedule::kQRing{ScheduleKind::kQRing};
inline constexpr Schedule Schedule::kInvariant{ScheduleKind::kInvariant};

// "ring", "gather", "ulysses", "pruned", "q_ring", "invariant"; "hybrid:2" (ranks that split heads) or "hybrid:2x4"
// (and teams in the ring); "double_ring:4" (ranks a node) or "double_ring:4x2" (and nodes).
std::string name_of(const Schedule& schedule);
Schedule parse_schedule(std::string_view name);
// The names, with what their numbers count, for messages and help.
std::string schedule_help();
// Each name, and what the number after its colon counts ("" = it takes none).
struct ScheduleName {
  std::string_view name, inner;
};
std::vector<ScheduleName> schedule_names();

// Whether query rows travel under it, in either pass, in a group of some ranks.
bool moves_queries(const Schedule& schedule);

// Whether a row's results may depend on nothing but the pairs that it keeps: tiles are those of the mask's bands,
// however rows are split, and kernels add in one order (ForwardArgs::fixed_order).
bool fixes_order(const Schedule& schedule);

// Error unless the schedule fits a group of `world` ranks.
void check_schedule(const Schedule& schedule, int64_t world);

// Every schedule that fits a group of `world` ranks, hybrids and double rings of every proper divisor included.
std::vector<Schedule> schedules_for(int64_t world);

}  // namespace ringspan
