#include "ringspan/sim/picture.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "ringspan/base/error.h"
#include "ringspan/shape/division.h"

namespace ringspan {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMostCells = 128;
constexpr int64_t kMostInterleavedCells = 32;
constexpr int64_t kMostRanks = 32;

bool interleaves(const ShardMap& map, int64_t batch) {
  for (int64_t rank = 0; rank < map.world(); ++rank) {
    for (const Segment& segment : map.segments(rank, batch)) {
      if (segment.length > 1 && segment.stride > 1) return true;
    }
  }
  return false;
}

// The cell that holds a position.
int64_t cell_of(const std::vector<int64_t>& begins, int64_t position) {
  return std::upper_bound(begins.begin(), begins.end(), position) - begins.begin() - 1;
}

void add_owner(CellAxis& axis, std::vector<std::vector<int64_t>>& firsts, const Segment& segment, int64_t rank) {
  const int64_t last_cell = cell_of(axis.begins, segment.position(segment.length - 1));
  for (int64_t cell = cell_of(axis.begins, segment.begin); cell <= last_cell; ++cell) {
    const auto offset_at = [&](int64_t position) {
      return std::clamp<int64_t>(ceil_div(position - segment.begin, segment.stride), 0, segment.length);
    };
    const int64_t begin = offset_at(axis.begins[cell]), end = offset_at(axis.begins[cell + 1]);
    if (begin == end) continue;
    std::vector<CellOwner>& owners = axis.owners[cell];
    std::vector<int64_t>& first = firsts[cell];
    const int64_t position = segment.position(begin);
    if (!owners.empty() && owners.back().rank == rank) {  // ranks come one after the other
      owners.back().positions += end - begin;
      first.back() = std::min(first.back(), position);
    } else {
      owners.push_back({.rank = rank, .positions = end - begin});
      first.push_back(position);
    }
  }
}

CellAxis axis_of(const ShardMap& map, int64_t batch, int64_t most_cells) {
  const int64_t num_cells = std::min(map.seq_len(), most_cells);
  CellAxis axis;
  for (int64_t cell = 0; cell <= num_cells; ++cell) {
    axis.begins.push_back(num_cells == 0 ? 0 : cell * map.seq_len() / num_cells);
  }
  axis.owners.resize(num_cells);
  std::vector<std::vector<int64_t>> firsts(num_cells);
  for (int64_t rank = 0; rank < map.world(); ++rank) {
    for (const Segment& segment : map.segments(rank, batch)) add_owner(axis, firsts, segment, rank);
  }
  for (int64_t cell = 0; cell < num_cells; ++cell) {
    std::vector<std::pair<int64_t, CellOwner>> order;
    for (size_t k = 0; k < firsts[cell].size(); ++k) order.emplace_back(firsts[cell][k], axis.owners[cell][k]);
    std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t k = 0; k < order.size(); ++k) axis.owners[cell][k] = order[k].second;
  }
  return axis;
}

// Visits the cells that a band can meet alone: a mask of many documents has many small bands.
void count_band(const Band& band, MaskPicture& picture) {
  if (is_empty(band)) return;
  const int64_t last_row_cell = cell_of(picture.q.begins, band.q_end - 1);
  for (int64_t r = cell_of(picture.q.begins, band.q_begin); r <= last_row_cell; ++r) {
    Band rows = band;
    rows.q_begin = std::max(band.q_begin, picture.q.begins[r]);
    rows.q_end = std::min(band.q_end, picture.q.begins[r + 1]);
    rows = tighten(rows);
    if (is_empty(rows)) continue;
    const int64_t last_column_cell = cell_of(picture.kv.begins, rows.kv_end - 1);
    for (int64_t c = cell_of(picture.kv.begins, rows.kv_begin); c <= last_column_cell; ++c) {
      Band cell = rows;
      cell.kv_begin = std::max(rows.kv_begin, picture.kv.begins[c]);
      cell.kv_end = std::min(rows.kv_end, picture.kv.begins[c + 1]);
      picture.kept[r][c] += count_pairs(tighten(cell));
    }
  }
}

Json json_of(const CellAxis& axis) {
  Json cells = Json::array();
  for (const std::vector<CellOwner>& owners : axis.owners) {
    Json cell = Json::array();
    for (const CellOwner& owner : owners) cell.push_back({owner.rank, owner.positions});
    cells.push_back(std::move(cell));
  }
  return {{"begins", axis.begins}, {"owners", std::move(cells)}};
}

// What both kinds of picture have.
Json frame_of(const Plan& plan, const std::string& note) {
  const MaskPicture picture = picture_of(plan.mask(), plan.q_map(), plan.kv_map());
  const bool lists_differ =
      plan.mask().num_lists() > 1 || plan.q_map().num_lists() > 1 || plan.kv_map().num_lists() > 1;
  Json json{{"schedule", name_of(plan.schedule())},
            {"world", plan.world()},
            {"problem", plan.problem().str()},
            {"note", note},
            {"batch", lists_differ ? Json(0) : Json(nullptr)}};
  json["mask"] = {{"q", json_of(picture.q)}, {"kv", json_of(picture.kv)}, {"kept", picture.kept}};
  json["ranks"] = pictured_ranks(plan.world());
  return json;
}

Json times_of(const SimulatedPass& pass, const std::vector<int64_t>& shown) {
  Json ranks = Json::array();
  for (const int64_t rank : shown) {
    const detail::RankTimes& times = pass.ranks[rank];
    RINGSPAN_CHECK(!times.steps.empty(), "picture: the simulation kept no steps of rank ", rank,
                   "; name pictured_ranks in steps_of");
    Json steps = Json::array();
    for (const detail::StepTimes& step : times.steps) {
      steps.push_back({{"step", step.step}, {"compute_begin", step.compute_begin}, {"compute_end", step.compute_end}});
    }
    ranks.push_back({{"end", times.end}, {"steps", std::move(steps)}});
  }
  return {{"seconds", pass.seconds}, {"end", pass.ranks[pass.slowest_rank].end}, {"ranks", std::move(ranks)}};
}

}  // namespace

MaskPicture picture_of(const MaskSpec& mask, const ShardMap& q_map, const ShardMap& kv_map, int64_t batch) {
  const bool is_interleaved = interleaves(q_map, batch) || interleaves(kv_map, batch);
  const int64_t most_cells = is_interleaved ? kMostInterleavedCells : kMostCells;
  MaskPicture picture{.q = axis_of(q_map, batch, most_cells), .kv = axis_of(kv_map, batch, most_cells), .kept = {}};
  picture.kept.assign(picture.q.num_cells(), std::vector<int64_t>(picture.kv.num_cells(), 0));
  for (const Band& band : mask.bands(batch)) count_band(band, picture);
  return picture;
}

std::vector<int64_t> pictured_ranks(int64_t world) {
  const int64_t count = std::min(world, kMostRanks);
  std::vector<int64_t> ranks;
  for (int64_t k = 0; k < count; ++k) ranks.push_back(count == 1 ? 0 : k * (world - 1) / (count - 1));
  return ranks;
}

std::string picture_json(const Plan& plan, const std::string& note) {
  Json json = frame_of(plan, note);
  json["pairs"] = Json::array();
  for (const int64_t rank : pictured_ranks(plan.world())) {
    const RankPlan part = plan.rank(rank);
    Json steps = Json::array();
    for (const Step& step : part.forward) steps.push_back(kept_pairs(step) * part.num_q_heads());
    json["pairs"].push_back(std::move(steps));
  }
  return json.dump();
}

std::string picture_json(const Plan& plan, const Simulation& simulation, const Machine& machine,
                         const std::string& note) {
  Json json = frame_of(plan, note);
  const std::vector<int64_t> shown = pictured_ranks(plan.world());
  json["times"] = {{"machine", machine.name},
                   {"forward", times_of(simulation.forward, shown)},
                   {"backward", times_of(simulation.backward, shown)}};
  return json.dump();
}

}  // namespace ringspan
