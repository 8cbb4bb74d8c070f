// Plan: what every rank computes and sends, decided before anything runs. Plain named integers: printable, comparable,
// serialisable; no tensor, group, stream or device.
//
// Ring over 3 ranks, forward. In step s rank r works on the K/V of rank r - s while it passes them on:
//
//              step 0        step 1        step 2
//     rank 0   KV0 | ->1     KV2 | ->1     KV1
//     rank 1   KV1 | ->2     KV0 | ->2     KV2
//     rank 2   KV2 | ->0     KV1 | ->0     KV0
//
// Backward adds the gradients of K/V, which follow one step behind and end at their owner. The grids of both routes,
// with messages and bytes, open plan/ring.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ringspan/mask/mask_spec.h"
#include "ringspan/plan/transfer.h"
#include "ringspan/shape/problem.h"
#include "ringspan/shard/shard_map.h"

namespace ringspan {

enum class Schedule : uint8_t { kRing };

const char* name_of(Schedule schedule);
Schedule parse_schedule(std::string_view name);

// How gradients of K/V come home. kFromOwner: they leave the owner with step 0's part, world hops (what a symmetric
// all_to_all posts). kFromNext: the owner keeps its own part, they start at the next rank, world - 1 hops.
enum class GradRoute : uint8_t { kFromOwner, kFromNext };

// Buffer slots of K/V and of their gradients on a rank. kOwnSlot is the caller's tensor (K/V) or what stays at home
// (gradients); 1 and 2 are the executor's and take turns: what is sent is never what is received into.
//
//   world 3      kv_slot   grad_slot, kFromOwner               grad_slot, kFromNext
//     step 0     0         1 begins, after: 1 -> next 2         0 begins (stays at home), nothing sent
//     step 1     1         2 adds,   after: 2 -> next 1         1 begins, after: 1 -> next 2
//     step 2     2         1 adds,   after: 1 -> home 2         2 adds,   after: 2 -> home 1
//     finish               home = 2                             home = 0 + 1
constexpr int64_t kOwnSlot = 0;
constexpr int64_t kNumSlots = 3;

struct Step {
  int64_t step = 0;
  int64_t kv_owner = 0;          // whose K/V the tiles read
  int64_t kv_slot = kOwnSlot;    // in which buffer they lie
  int64_t grad_slot = kOwnSlot;  // backward: where this step's gradients of K/V are added
  bool grad_begins = true;       // backward: they are the first there, the slot is overwritten
  std::vector<Tile> tiles;       // rows of q are this rank's, rows of kv are the owner's
  std::vector<Transfer> before;  // posted before the tiles are computed; complete before the next step computes
  std::vector<Transfer> after;   // posted after it (gradients of K/V); complete when the receiver next adds to them

  bool operator==(const Step&) const = default;
};

// One rank's part. Every transfer that it sends or receives is listed, in the order of posting.
struct RankPlan {
  int64_t rank = 0, world = 1;
  Schedule schedule = Schedule::kRing;
  GradRoute grad_route = GradRoute::kFromNext;
  Problem problem;
  std::vector<int64_t> q_rows, kv_rows;  // local rows of every rank
  // Query rows of this rank that hold no position, by batch entry (one list = all): no row of the sequence ends there.
  std::vector<std::vector<RowRange>> q_padding;
  std::vector<Step> forward;
  std::vector<Step> backward;

  bool operator==(const RankPlan&) const = default;
  std::string str() const;
};

// Holds the question (problem, mask, maps) and answers it rank by rank, each in time of its own steps.
class Plan {
 public:
  Plan(Problem problem, MaskSpec mask, ShardMap q_map, ShardMap kv_map, Schedule schedule, GradRoute grad_route);

  const Problem& problem() const { return problem_; }
  const MaskSpec& mask() const { return mask_; }
  const ShardMap& q_map() const { return q_map_; }
  const ShardMap& kv_map() const { return kv_map_; }
  Schedule schedule() const { return schedule_; }
  GradRoute grad_route() const { return grad_route_; }
  int64_t world() const { return q_map_.world(); }

  RankPlan rank(int64_t rank) const;

  // {"problem": ..., "schedule": ..., "ranks": [...]}; from_json(to_json()) of a rank's part gives the same part.
  std::string to_json() const;
  std::string str() const;

 private:
  Problem problem_;
  MaskSpec mask_;
  ShardMap q_map_, kv_map_;
  Schedule schedule_;
  GradRoute grad_route_;
};

// Checks that all fit together (lengths of mask, maps and problem; batch lists; equal worlds; K/V held once each).
Plan build_plan(const Problem& problem, const MaskSpec& mask, const ShardMap& q_map, const ShardMap& kv_map,
                Schedule schedule, GradRoute grad_route = GradRoute::kFromNext);
Plan build_plan(const Problem& problem, const MaskSpec& mask, const ShardMap& map, Schedule schedule);

// RankPlan::q_padding of a rank.
std::vector<std::vector<RowRange>> padding_of(const ShardMap& map, int64_t rank);

std::string to_json(const RankPlan& part);
RankPlan rank_plan_from_json(std::string_view text);

// Bytes of one transfer: rows x heads x batch x head dim x element size (gradients in the accumulator type; one value
// a row for statistics and delta).
int64_t bytes_of(const Transfer& transfer, const Problem& problem);
// What `part.rank` sends, forward and backward.
struct SentBytes {
  int64_t forward = 0, backward = 0;
};
SentBytes sent_bytes(const RankPlan& part);

}  // namespace ringspan
