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
// Every schedule (plan/schedule.h) is such a list of steps, run by the same loop. Of its schedule a runner asks only
// whether sums have a fixed order (fixes_order).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ringspan/mask/mask_spec.h"
#include "ringspan/plan/schedule.h"
#include "ringspan/plan/transfer.h"
#include "ringspan/shape/problem.h"
#include "ringspan/shard/shard_map.h"

namespace ringspan {

// How gradients that go round come home. kFromOwner: they leave the owner with step 0's part, world hops (what a
// symmetric all_to_all posts). kFromNext: the owner keeps its own part, they start at the next rank, world - 1 hops.
enum class GradRoute : uint8_t { kFromOwner, kFromNext };
const char* name_of(GradRoute route);
// `what` is what an Error calls it.
GradRoute parse_route(std::string_view name, std::string_view what);

// Rows that a step works on: of queries (q, and in backward dout, lse, delta) or of keys and values (k, v). Buffers of
// one side have the same rows and heads in the same slot.
struct Operand {
  int64_t slot = kOwnSlot;
  int64_t owner = 0;  // whose rows lie there, or kSeveral
  int64_t rows = 0;   // of the buffer
  int64_t head_begin = 0, head_end = 0;

  bool operator==(const Operand&) const = default;
};

struct HeadRange {
  int64_t begin = 0, end = 0;
};
// The heads of a payload's tensor that belong to an operand of its side. A tensor that heads share has one.
HeadRange heads_of(Payload payload, const Problem& problem, const Operand& operand);

// In the place of a slot: the step leaves these gradients to another one.
constexpr int64_t kNoSlot = -1;

// Where a step adds the gradients of an operand: a buffer of that operand's rows and heads.
struct GradientPlace {
  int64_t slot = kOwnSlot;
  bool begins = true;  // they are the first there: it is overwritten
  bool is_computed() const { return slot != kNoSlot; }
  bool operator==(const GradientPlace&) const = default;
};

struct Step {
  int64_t step = 0;
  bool computes = true;  // else it only sends and receives
  Operand q{}, kv{};
  GradientPlace dq{}, dkv{};       // backward
  std::vector<Tile> tiles{};       // rows count in the buffers of q and kv
  std::vector<Transfer> before{};  // posted before the tiles are computed
  std::vector<Transfer> after{};   // posted after it (results and gradients)

  bool operator==(const Step&) const = default;
};

// Query heads that read KV heads in the usual way: head h of them KV head h / (query heads / KV heads), counted within
// the block. A rank that works on all heads has one block.
struct HeadBlock {
  int64_t q_begin = 0, q_end = 0, kv_begin = 0, kv_end = 0;
  bool operator==(const HeadBlock&) const = default;
};

// One rank's part. Every transfer that it sends or receives is listed, in the order of posting.
struct RankPlan {
  int64_t rank = 0, world = 1;
  Schedule schedule = Schedule::kRing;
  GradRoute grad_route = GradRoute::kFromNext;
  Problem problem;
  std::vector<int64_t> q_rows, kv_rows;  // local rows of every rank
  std::vector<HeadBlock> heads;          // that this rank computes; empty where there are fewer than ranks
  // Rows of the forward's query operand that hold no position, by batch entry (one list = all): no row of the sequence
  // ends there.
  std::vector<std::vector<RowRange>> q_padding;
  std::vector<Step> forward;
  std::vector<Step> backward;

  // Of the tensor that `rank` brings: query rows, or those of K/V.
  int64_t local_rows(Payload payload, int64_t of_rank) const { return (is_of_kv(payload) ? kv_rows : q_rows)[of_rank]; }
  int64_t num_q_heads() const;  // that this rank computes

  bool operator==(const RankPlan&) const = default;
  std::string str() const;
};

// Whether query rows travel, so that what is split by them must travel too (Problem::bias, mask).
bool moves_queries(const RankPlan& part);

// Whether this rank sums a gradient of its own rows in slot kOwnSlot, which then needs the accumulator type. Else it
// arrives there whole.
bool sums_at_home(const RankPlan& part, Payload gradient);

// Whether backward's steps do not all add to the same dq: queries visit this rank, with gradients of their own.
bool moves_dq(const RankPlan& part);
// Whether such a step computes dq apart, since what it adds to still travels.
inline bool is_dq_apart(const Step& step, bool moves_dq) {
  return moves_dq && step.dq.is_computed() && !step.dq.begins;
}

// Holds the question (problem, mask, maps) and answers it rank by rank, each in time of its own steps.
class Plan {
 public:
  Plan(const Problem& problem, MaskSpec mask, ShardMap q_map, ShardMap kv_map, Schedule schedule, GradRoute grad_route);

  const Problem& problem() const { return problem_; }
  const MaskSpec& mask() const { return mask_; }
  const ShardMap& q_map() const { return q_map_; }
  const ShardMap& kv_map() const { return kv_map_; }
  const Schedule& schedule() const { return schedule_; }
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

// Checks that all fit together (lengths of mask, maps and problem; batch lists; equal worlds; K/V held once each; the
// schedule's inner number).
Plan build_plan(const Problem& problem, const MaskSpec& mask, const ShardMap& q_map, const ShardMap& kv_map,
                const Schedule& schedule, GradRoute grad_route = GradRoute::kFromNext);
Plan build_plan(const Problem& problem, const MaskSpec& mask, const ShardMap& map, const Schedule& schedule);

std::string to_json(const RankPlan& part);
RankPlan rank_plan_from_json(std::string_view text);

// (query, key) pairs that the tiles of a step keep, of all batch entries and one head.
int64_t kept_pairs(const Step& step);

// What `part.rank` sends: in a step; forward and backward.
int64_t sent_bytes(const Step& step, const RankPlan& part);
struct SentBytes {
  int64_t forward = 0, backward = 0;
};
SentBytes sent_bytes(const RankPlan& part);

}  // namespace ringspan
