#include "ringspan/plan/schedules/builder.h"

#include <algorithm>
#include <utility>

namespace ringspan::detail {

Rows rows_of(const ShardMap& map, std::span<const int64_t> ranks) {
  Rows rows;
  rows.segments.resize(static_cast<size_t>(map.num_lists()));
  for (const int64_t rank : ranks) {
    for (int64_t list = 0; list < map.num_lists(); ++list) {
      for (Segment segment : map.segments(rank, list)) {
        segment.local_row += rows.count;
        rows.segments[list].push_back(segment);
      }
    }
    rows.count += map.local_rows(rank);
  }
  return rows;
}

Rows rows_of(const ShardMap& map, int64_t rank) { return rows_of(map, std::span(&rank, 1)); }

std::vector<Tile> tiles_between(const Plan& plan, const Rows& q, const Rows& kv) {
  const auto list_of = [](const Rows& rows, int64_t batch) -> std::span<const Segment> {
    return rows.segments[rows.segments.size() == 1 ? 0 : batch];
  };
  const int64_t num_lists = std::max(
      {plan.mask().num_lists(), static_cast<int64_t>(q.segments.size()), static_cast<int64_t>(kv.segments.size())});
  const bool unites = !fixes_order(plan.schedule());
  std::vector<Tile> tiles;
  for (int64_t batch = 0; batch < num_lists; ++batch) {
    const std::vector<Tile> found = intersect(plan.mask(), batch, list_of(q, batch), list_of(kv, batch), unites);
    tiles.insert(tiles.end(), found.begin(), found.end());
  }
  // One list for all entries: the others differ in nothing but the batch index.
  const size_t num_tiles = tiles.size();
  const int64_t copies = num_lists == 1 ? plan.problem().batch : 1;
  tiles.reserve(num_tiles * copies);
  for (int64_t batch = 1; batch < copies; ++batch) {
    for (size_t k = 0; k < num_tiles; ++k) {
      tiles.push_back(tiles[k]);
      tiles.back().batch = batch;
    }
  }
  return tiles;
}

std::vector<std::vector<RowRange>> padding_of(const Rows& rows) {
  std::vector<std::vector<RowRange>> lists(rows.segments.size());
  for (size_t list = 0; list < lists.size(); ++list) {
    int64_t row = 0;
    for (const Segment& segment : rows.segments[list]) {
      if (segment.local_row > row) lists[list].push_back({row, segment.local_row});
      row = segment.local_row + segment.length;
    }
    if (row < rows.count) lists[list].push_back({row, rows.count});
  }
  return lists;
}

Operand q_shard(const RankPlan& part, int64_t owner, int64_t slot) {
  return {.slot = slot, .owner = owner, .rows = part.q_rows[owner], .head_end = part.problem.q_heads};
}

Operand kv_shard(const RankPlan& part, int64_t owner, int64_t slot) {
  return {.slot = slot, .owner = owner, .rows = part.kv_rows[owner], .head_end = part.problem.kv_heads};
}

std::vector<Payload> kv_inputs() { return {Payload::kK, Payload::kV}; }

std::vector<Payload> forward_q_inputs(const Problem& problem) {
  std::vector<Payload> payloads = {Payload::kQ};
  if (problem.bias.is_given()) payloads.push_back(Payload::kBias);
  if (problem.mask.is_given()) payloads.push_back(Payload::kMask);
  return payloads;
}

std::vector<Payload> backward_q_inputs(const Problem& problem) {
  std::vector<Payload> payloads = forward_q_inputs(problem);
  payloads.insert(payloads.end(), {Payload::kDout, Payload::kLse, Payload::kDelta});
  return payloads;
}

std::vector<Payload> kv_gradients() { return {Payload::kDk, Payload::kDv}; }

std::vector<Payload> q_gradients(const Problem& problem) {
  std::vector<Payload> payloads = {Payload::kDq};
  if (problem.bias.has_gradient()) payloads.push_back(Payload::kDbias);
  return payloads;
}

std::vector<Payload> results() { return {Payload::kOut, Payload::kMax, Payload::kSum, Payload::kLse}; }

Transfer transfer_of(const RankPlan& part, Payload payload, const Route& route, std::vector<RowRange> rows) {
  // The smaller of the two ends says which heads travel.
  const bool to_is_smaller = route.to.head_end - route.to.head_begin < route.from.head_end - route.from.head_begin;
  const HeadRange heads = heads_of(payload, part.problem, to_is_smaller ? route.to : route.from);
  const auto place_of = [&](const Operand& operand, int64_t row, int64_t stride) {
    if (operand.slot == kOwnSlot) return BufferPlace{};
    const HeadRange held = heads_of(payload, part.problem, operand);
    return BufferPlace{.slot = operand.slot,
                       .rows = operand.rows,
                       .row = row,
                       .stride = stride,
                       .head_begin = held.begin,
                       .head_end = held.end};
  };
  return {.step = route.step,
          .needed_by = route.needed_by,
          .src = route.src,
          .dst = route.dst,
          .payload = payload,
          .owner = route.owner,
          .batch_begin = 0,
          .batch_end = size_of(payload, part.problem).batch,
          .head_begin = heads.begin,
          .head_end = heads.end,
          .rows = std::move(rows),
          .from = place_of(route.from, route.from_row, route.from_stride),
          .to = place_of(route.to, route.to_row, route.to_stride),
          .adds = route.adds};
}

}  // namespace ringspan::detail
