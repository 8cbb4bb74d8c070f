// Plans as JSON. Tiles are many, so each is one array of numbers in the order that "tile_fields" names.
#include <nlohmann/json.hpp>

#include "ringspan/base/error.h"
#include "ringspan/plan/plan.h"

namespace ringspan {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t Tile::* kTileFields[] = {&Tile::batch,     &Tile::q_row0,  &Tile::q_rows,  &Tile::q_pos0,
                                           &Tile::q_stride,  &Tile::kv_row0, &Tile::kv_rows, &Tile::kv_pos0,
                                           &Tile::kv_stride, &Tile::lo,      &Tile::hi};
constexpr const char* kTileNames[] = {"batch",   "q_row0",  "q_rows",    "q_pos0", "q_stride", "kv_row0",
                                      "kv_rows", "kv_pos0", "kv_stride", "lo",     "hi"};

const char* name_of_route(GradRoute route) { return route == GradRoute::kFromOwner ? "from_owner" : "from_next"; }

GradRoute parse_route(const std::string& name) {
  for (GradRoute route : {GradRoute::kFromOwner, GradRoute::kFromNext}) {
    if (name == name_of_route(route)) return route;
  }
  throw Error(concat("plan: grad_route \"", name, "\" is unknown; use from_owner or from_next"));
}

Json json_of(const RowTensor& tensor) {
  return {{"batch", tensor.batch},
          {"heads", tensor.heads},
          {"element_bytes", tensor.element_bytes},
          {"wants_gradient", tensor.wants_gradient}};
}

RowTensor row_tensor_of(const Json& json) {
  RowTensor tensor;
  json.at("batch").get_to(tensor.batch);
  json.at("heads").get_to(tensor.heads);
  json.at("element_bytes").get_to(tensor.element_bytes);
  json.at("wants_gradient").get_to(tensor.wants_gradient);
  return tensor;
}

Json json_of(const Problem& problem) {
  return {{"batch", problem.batch}, {"q_heads", problem.q_heads},      {"kv_heads", problem.kv_heads},
          {"q_len", problem.q_len}, {"kv_len", problem.kv_len},        {"qk_dim", problem.qk_dim},
          {"v_dim", problem.v_dim}, {"dtype", name_of(problem.dtype)}, {"layout", name_of(problem.layout)},
          {"scale", problem.scale}, {"bias", json_of(problem.bias)},   {"mask", json_of(problem.mask)}};
}

Problem problem_of(const Json& json) {
  Problem problem;
  json.at("batch").get_to(problem.batch);
  json.at("q_heads").get_to(problem.q_heads);
  json.at("kv_heads").get_to(problem.kv_heads);
  json.at("q_len").get_to(problem.q_len);
  json.at("kv_len").get_to(problem.kv_len);
  json.at("qk_dim").get_to(problem.qk_dim);
  json.at("v_dim").get_to(problem.v_dim);
  problem.dtype = parse_dtype(json.at("dtype").get<std::string>());
  problem.layout = parse_layout(json.at("layout").get<std::string>());
  json.at("scale").get_to(problem.scale);
  problem.bias = row_tensor_of(json.at("bias"));
  problem.mask = row_tensor_of(json.at("mask"));
  return problem;
}

Json json_of(const Tile& tile) {
  Json json = Json::array();
  for (int64_t Tile::* field : kTileFields) json.push_back(tile.*field);
  return json;
}

Tile tile_of(const Json& json) {
  RINGSPAN_CHECK(json.is_array() && json.size() == std::size(kTileFields), "plan: a tile has ", json.size(),
                 " numbers; it needs ", std::size(kTileFields));
  Tile tile;
  for (size_t k = 0; k < std::size(kTileFields); ++k) json[k].get_to(tile.*kTileFields[k]);
  return tile;
}

Json json_of(const Place& place) {
  return {{"slot", place.slot},
          {"rows", place.rows},
          {"row", place.row},
          {"stride", place.stride},
          {"heads", {place.head_begin, place.head_end}}};
}

Place place_of(const Json& json) {
  Place place;
  json.at("slot").get_to(place.slot);
  json.at("rows").get_to(place.rows);
  json.at("row").get_to(place.row);
  json.at("stride").get_to(place.stride);
  json.at("heads").at(0).get_to(place.head_begin);
  json.at("heads").at(1).get_to(place.head_end);
  return place;
}

Json json_of(const Transfer& transfer) {
  Json rows = Json::array();
  for (const RowRange& range : transfer.rows) rows.push_back({range.begin, range.end});
  return {{"step", transfer.step},
          {"needed_by", transfer.needed_by},
          {"src", transfer.src},
          {"dst", transfer.dst},
          {"payload", name_of(transfer.payload)},
          {"owner", transfer.owner},
          {"batch", {transfer.batch_begin, transfer.batch_end}},
          {"heads", {transfer.head_begin, transfer.head_end}},
          {"rows", std::move(rows)},
          {"from", json_of(transfer.from)},
          {"to", json_of(transfer.to)},
          {"adds", transfer.adds}};
}

Transfer transfer_of(const Json& json) {
  Transfer transfer;
  json.at("step").get_to(transfer.step);
  json.at("needed_by").get_to(transfer.needed_by);
  json.at("src").get_to(transfer.src);
  json.at("dst").get_to(transfer.dst);
  transfer.payload = parse_payload(json.at("payload").get<std::string>());
  json.at("owner").get_to(transfer.owner);
  json.at("batch").at(0).get_to(transfer.batch_begin);
  json.at("batch").at(1).get_to(transfer.batch_end);
  json.at("heads").at(0).get_to(transfer.head_begin);
  json.at("heads").at(1).get_to(transfer.head_end);
  for (const Json& range : json.at("rows")) {
    transfer.rows.push_back({.begin = range.at(0).get<int64_t>(), .end = range.at(1).get<int64_t>()});
  }
  transfer.from = place_of(json.at("from"));
  transfer.to = place_of(json.at("to"));
  json.at("adds").get_to(transfer.adds);
  return transfer;
}

Json json_of(const Operand& operand) {
  return {{"slot", operand.slot},
          {"owner", operand.owner},
          {"rows", operand.rows},
          {"heads", {operand.head_begin, operand.head_end}}};
}

Operand operand_of(const Json& json) {
  Operand operand;
  json.at("slot").get_to(operand.slot);
  json.at("owner").get_to(operand.owner);
  json.at("rows").get_to(operand.rows);
  json.at("heads").at(0).get_to(operand.head_begin);
  json.at("heads").at(1).get_to(operand.head_end);
  return operand;
}

Json json_of(const GradientPlace& place) { return {{"slot", place.slot}, {"begins", place.begins}}; }

GradientPlace gradient_place_of(const Json& json) {
  GradientPlace place;
  json.at("slot").get_to(place.slot);
  json.at("begins").get_to(place.begins);
  return place;
}

Json json_of(const HeadBlock& block) {
  return {{"q", {block.q_begin, block.q_end}}, {"kv", {block.kv_begin, block.kv_end}}};
}

HeadBlock head_block_of(const Json& json) {
  HeadBlock block;
  json.at("q").at(0).get_to(block.q_begin);
  json.at("q").at(1).get_to(block.q_end);
  json.at("kv").at(0).get_to(block.kv_begin);
  json.at("kv").at(1).get_to(block.kv_end);
  return block;
}

Json json_of(const Step& step);

template <class Item>
Json json_of(const std::vector<Item>& items) {
  Json json = Json::array();
  for (const Item& item : items) json.push_back(json_of(item));
  return json;
}

Json json_of(const Step& step) {
  return {{"step", step.step},
          {"computes", step.computes},
          {"q", json_of(step.q)},
          {"kv", json_of(step.kv)},
          {"dq", json_of(step.dq)},
          {"dkv", json_of(step.dkv)},
          {"tiles", json_of(step.tiles)},
          {"before", json_of(step.before)},
          {"after", json_of(step.after)}};
}

Step step_of(const Json& json) {
  Step step;
  json.at("step").get_to(step.step);
  json.at("computes").get_to(step.computes);
  step.q = operand_of(json.at("q"));
  step.kv = operand_of(json.at("kv"));
  step.dq = gradient_place_of(json.at("dq"));
  step.dkv = gradient_place_of(json.at("dkv"));
  for (const Json& tile : json.at("tiles")) step.tiles.push_back(tile_of(tile));
  for (const Json& transfer : json.at("before")) step.before.push_back(transfer_of(transfer));
  for (const Json& transfer : json.at("after")) step.after.push_back(transfer_of(transfer));
  return step;
}

Json json_of_ranges(const std::vector<std::vector<RowRange>>& lists) {
  Json json = Json::array();
  for (const std::vector<RowRange>& list : lists) {
    Json ranges = Json::array();
    for (const RowRange& range : list) ranges.push_back({range.begin, range.end});
    json.push_back(std::move(ranges));
  }
  return json;
}

std::vector<std::vector<RowRange>> ranges_of(const Json& json) {
  std::vector<std::vector<RowRange>> lists;
  for (const Json& list : json) {
    lists.emplace_back();
    for (const Json& range : list) {
      lists.back().push_back({range.at(0).get<int64_t>(), range.at(1).get<int64_t>()});
    }
  }
  return lists;
}

Json json_of(const RankPlan& part) {
  return {{"rank", part.rank},
          {"world", part.world},
          {"schedule", name_of(part.schedule)},
          {"grad_route", name_of_route(part.grad_route)},
          {"problem", json_of(part.problem)},
          {"q_rows", part.q_rows},
          {"kv_rows", part.kv_rows},
          {"head_blocks", json_of(part.heads)},
          {"q_padding", json_of_ranges(part.q_padding)},
          {"tile_fields", kTileNames},
          {"forward", json_of(part.forward)},
          {"backward", json_of(part.backward)}};
}

}  // namespace

std::string to_json(const RankPlan& part) { return json_of(part).dump(); }

RankPlan rank_plan_from_json(std::string_view text) {
  try {
    const Json json = Json::parse(text);
    RankPlan part;
    json.at("rank").get_to(part.rank);
    json.at("world").get_to(part.world);
    part.schedule = parse_schedule(json.at("schedule").get<std::string>());
    part.grad_route = parse_route(json.at("grad_route").get<std::string>());
    part.problem = problem_of(json.at("problem"));
    json.at("q_rows").get_to(part.q_rows);
    json.at("kv_rows").get_to(part.kv_rows);
    for (const Json& block : json.at("head_blocks")) part.heads.push_back(head_block_of(block));
    part.q_padding = ranges_of(json.at("q_padding"));
    for (const Json& step : json.at("forward")) part.forward.push_back(step_of(step));
    for (const Json& step : json.at("backward")) part.backward.push_back(step_of(step));
    return part;
  } catch (const Json::exception& fault) {
    throw Error(concat("plan: this is not the JSON of a rank's part: ", fault.what()));
  }
}

std::string Plan::to_json() const {
  Json ranks = Json::array();
  for (int64_t r = 0; r < world(); ++r) ranks.push_back(json_of(rank(r)));
  return Json{{"problem", json_of(problem_)},
              {"schedule", name_of(schedule_)},
              {"grad_route", name_of_route(grad_route_)},
              {"world", world()},
              {"ranks", std::move(ranks)}}
      .dump();
}

}  // namespace ringspan
