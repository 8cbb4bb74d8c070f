// Plans as JSON. Tiles are many, so each is one array of numbers in the order that "tile_fields" names.
#include <concepts>
#include <iterator>
#include <type_traits>

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

// The fields of each struct, named once for both directions: `archive` is a Writer or a Reader.
template <class T, class Struct>
concept Of = std::same_as<std::remove_const_t<T>, Struct>;

void fields(auto& archive, Of<RowTensor> auto& tensor) {
  archive("batch", tensor.batch);
  archive("heads", tensor.heads);
  archive("element_bytes", tensor.element_bytes);
  archive("wants_gradient", tensor.wants_gradient);
}

void fields(auto& archive, Of<Problem> auto& problem) {
  archive("batch", problem.batch);
  archive("q_heads", problem.q_heads);
  archive("kv_heads", problem.kv_heads);
  archive("q_len", problem.q_len);
  archive("kv_len", problem.kv_len);
  archive("qk_dim", problem.qk_dim);
  archive("v_dim", problem.v_dim);
  archive("dtype", problem.dtype);
  archive("layout", problem.layout);
  archive("scale", problem.scale);
  archive("bias", problem.bias);
  archive("mask", problem.mask);
}

void fields(auto& archive, Of<BufferPlace> auto& place) {
  archive("slot", place.slot);
  archive("rows", place.rows);
  archive("row", place.row);
  archive("stride", place.stride);
  archive.range("heads", place.head_begin, place.head_end);
}

void fields(auto& archive, Of<Transfer> auto& transfer) {
  archive("step", transfer.step);
  archive("needed_by", transfer.needed_by);
  archive("src", transfer.src);
  archive("dst", transfer.dst);
  archive("payload", transfer.payload);
  archive("owner", transfer.owner);
  archive.range("batch", transfer.batch_begin, transfer.batch_end);
  archive.range("heads", transfer.head_begin, transfer.head_end);
  archive("rows", transfer.rows);
  archive("from", transfer.from);
  archive("to", transfer.to);
  archive("adds", transfer.adds);
}

void fields(auto& archive, Of<Operand> auto& operand) {
  archive("slot", operand.slot);
  archive("owner", operand.owner);
  archive("rows", operand.rows);
  archive.range("heads", operand.head_begin, operand.head_end);
}

void fields(auto& archive, Of<GradientPlace> auto& place) {
  archive("slot", place.slot);
  archive("begins", place.begins);
}

void fields(auto& archive, Of<HeadBlock> auto& block) {
  archive.range("q", block.q_begin, block.q_end);
  archive.range("kv", block.kv_begin, block.kv_end);
}

void fields(auto& archive, Of<Step> auto& step) {
  archive("step", step.step);
  archive("computes", step.computes);
  archive("q", step.q);
  archive("kv", step.kv);
  archive("dq", step.dq);
  archive("dkv", step.dkv);
  archive("tiles", step.tiles);
  archive("before", step.before);
  archive("after", step.after);
}

void fields(auto& archive, Of<RankPlan> auto& part) {
  archive("rank", part.rank);
  archive("world", part.world);
  archive("schedule", part.schedule);
  archive("grad_route", part.grad_route);
  archive("problem", part.problem);
  archive("q_rows", part.q_rows);
  archive("kv_rows", part.kv_rows);
  archive("head_blocks", part.heads);
  archive("q_padding", part.q_padding);
  archive.explain("tile_fields", kTileNames);
  archive("forward", part.forward);
  archive("backward", part.backward);
}

template <class T>
Json json_of(const T& value);
template <class T>
void read(const Json& json, T& value);

struct Writer {
  Json json = Json::object();

  void operator()(const char* name, const auto& value) { json[name] = json_of(value); }
  void range(const char* name, int64_t begin, int64_t end) { json[name] = Json::array({begin, end}); }
  // For readers alone.
  void explain(const char* name, const auto& value) { json[name] = value; }
};

struct Reader {
  const Json& json;

  void operator()(const char* name, auto& value) { read(json.at(name), value); }
  void range(const char* name, int64_t& begin, int64_t& end) {
    json.at(name).at(0).get_to(begin);
    json.at(name).at(1).get_to(end);
  }
  void explain(const char*, const auto&) {}
};

Json json_of_tile(const Tile& tile) {
  Json json = Json::array();
  for (int64_t Tile::* field : kTileFields) json.push_back(tile.*field);
  return json;
}

void read_tile(const Json& json, Tile& tile) {
  RINGSPAN_CHECK(json.is_array() && json.size() == std::size(kTileFields), "plan: a tile has ", json.size(),
                 " numbers; it needs ", std::size(kTileFields));
  for (size_t k = 0; k < std::size(kTileFields); ++k) json[k].get_to(tile.*kTileFields[k]);
}

template <class T>
constexpr bool kIsVector = false;
template <class T>
constexpr bool kIsVector<std::vector<T>> = true;

template <class T>
Json json_of(const T& value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return value;
  } else if constexpr (std::is_enum_v<T> || std::same_as<T, Schedule>) {
    return name_of(value);
  } else if constexpr (kIsVector<T>) {
    Json json = Json::array();
    for (const auto& item : value) json.push_back(json_of(item));
    return json;
  } else if constexpr (std::same_as<T, Tile>) {
    return json_of_tile(value);
  } else if constexpr (std::same_as<T, RowRange>) {
    return Json::array({value.begin, value.end});
  } else {
    Writer writer;
    fields(writer, value);
    return std::move(writer.json);
  }
}

void read_name(const std::string& name, DType& value) { value = parse_dtype(name); }
void read_name(const std::string& name, Layout& value) { value = parse_layout(name); }
void read_name(const std::string& name, Payload& value) { value = parse_payload(name); }
void read_name(const std::string& name, Schedule& value) { value = parse_schedule(name); }
void read_name(const std::string& name, GradRoute& value) { value = parse_route(name, "plan: grad_route"); }

template <class T>
void read(const Json& json, T& value) {
  if constexpr (std::is_arithmetic_v<T>) {
    json.get_to(value);
  } else if constexpr (std::is_enum_v<T> || std::same_as<T, Schedule>) {
    read_name(json.get<std::string>(), value);
  } else if constexpr (kIsVector<T>) {
    RINGSPAN_CHECK(json.is_array(), "plan: ", json.dump(), " stands where a list must");
    for (const Json& item : json) read(item, value.emplace_back());
  } else if constexpr (std::same_as<T, Tile>) {
    read_tile(json, value);
  } else if constexpr (std::same_as<T, RowRange>) {
    json.at(0).get_to(value.begin);
    json.at(1).get_to(value.end);
  } else {
    Reader reader{json};
    fields(reader, value);
  }
}

}  // namespace

std::string to_json(const RankPlan& part) { return json_of(part).dump(); }

RankPlan rank_plan_from_json(std::string_view text) {
  try {
    RankPlan part;
    read(Json::parse(text), part);
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
              {"grad_route", name_of(grad_route_)},
              {"world", world()},
              {"ranks", std::move(ranks)}}
      .dump();
}

}  // namespace ringspan
