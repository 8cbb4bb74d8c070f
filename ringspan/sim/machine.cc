#include "ringspan/sim/machine.h"

#include <cmath>
#include <cstdlib>
#include <utility>

#include <nlohmann/json.hpp>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

using Json = nlohmann::ordered_json;

void check_positive(const char* field, double value) {
  RINGSPAN_CHECK(std::isfinite(value) && value > 0, "machine: ", field, " is ", value, "; it must be more than 0");
}

void check_not_negative(const char* field, double value) {
  RINGSPAN_CHECK(std::isfinite(value) && value >= 0, "machine: ", field, " is ", value, "; it must be 0 or more");
}

// The fields of each struct, named once for both directions.
template <class Archive, class Link>
void link_fields(Archive& archive, Link& link) {
  archive("latency_seconds", link.latency_seconds);
  archive("bytes_per_second", link.bytes_per_second);
}

template <class Archive, class Speed>
void speed_fields(Archive& archive, Speed& speed) {
  archive("dtype", speed.dtype);
  archive("head_dim", speed.head_dim);
  archive("forward_flops_per_second", speed.forward_flops_per_second);
  archive("backward_flops_per_second", speed.backward_flops_per_second);
  archive("forward_row_seconds", speed.forward_row_seconds);
  archive("backward_row_seconds", speed.backward_row_seconds);
}

template <class Archive, class Subject>
void machine_fields(Archive& archive, Subject& machine) {
  archive("name", machine.name);
  archive("source", machine.source);
  archive("ranks_per_node", machine.ranks_per_node);
  archive("processors_per_node", machine.processors_per_node);
  archive("memory_bytes", machine.memory_bytes);
  archive("node", machine.node);
  archive("network", machine.network);
  archive("overlap", machine.overlap);
  archive("all_to_all_waits_for_all", machine.all_to_all_waits_for_all);
  archive("copy_bytes_per_second", machine.copy_bytes_per_second);
  archive("forward_call_seconds", machine.forward_call_seconds);
  archive("backward_call_seconds", machine.backward_call_seconds);
  archive("step_seconds", machine.step_seconds);
  archive("kernels", machine.kernels);
}

struct Writer {
  Json& json;
  void operator()(const char* name, const auto& value) { json[name] = value; }
};

class Reader {
 public:
  Reader(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
    RINGSPAN_CHECK(json.is_object(), "machine: ", where_, " must be an object; it is ", json.dump());
  }

  void operator()(const char* name, std::string& value) { value = field(name, &Json::is_string).get<std::string>(); }
  void operator()(const char* name, double& value) { value = field(name, &Json::is_number).get<double>(); }
  void operator()(const char* name, int64_t& value) { value = field(name, &Json::is_number_integer).get<int64_t>(); }
  void operator()(const char* name, bool& value) { value = field(name, &Json::is_boolean).get<bool>(); }
  void operator()(const char* name, DType& value) {
    value = parse_dtype(field(name, &Json::is_string).get<std::string>());
  }
  void operator()(const char* name, LinkClass& link) {
    Reader reader(field(name, &Json::is_object), name);
    link_fields(reader, link);
    reader.finish();
  }
  void operator()(const char* name, std::vector<KernelSpeed>& speeds) {
    for (const Json& item : field(name, &Json::is_array)) {
      Reader reader(item, concat("kernels[", speeds.size(), "]"));
      speed_fields(reader, speeds.emplace_back());
      reader.finish();
    }
  }

  // Error for a field that nobody asked for.
  void finish() const {
    for (const auto& [name, value] : json_.items()) {
      bool is_known = false;
      for (const std::string& known : known_) is_known = is_known || known == name;
      RINGSPAN_CHECK(is_known, "machine: ", where_, " has a field \"", name, "\" that means nothing here");
    }
  }

 private:
  template <class Predicate>
  const Json& field(const char* name, Predicate has_type) {
    known_.emplace_back(name);
    RINGSPAN_CHECK(json_.contains(name), "machine: ", where_, " has no field \"", name, "\"");
    const Json& value = json_.at(name);
    RINGSPAN_CHECK((value.*has_type)(), "machine: ", where_, " has ", value.dump(), " as \"", name,
                   "\", which is of another type");
    return value;
  }

  const Json& json_;
  std::string where_;
  std::vector<std::string> known_;
};

}  // namespace

// The JSON library looks for these beside the types.
static void to_json(Json& json, const DType& dtype) { json = name_of(dtype); }
static void to_json(Json& json, const LinkClass& link) {
  Writer writer{json};
  link_fields(writer, link);
}
static void to_json(Json& json, const KernelSpeed& speed) {
  Writer writer{json};
  speed_fields(writer, speed);
}

void Machine::check() const {
  RINGSPAN_CHECK(ranks_per_node >= 1, "machine: ranks_per_node is ", ranks_per_node, "; it must be at least 1");
  RINGSPAN_CHECK(processors_per_node >= 1, "machine: processors_per_node is ", processors_per_node,
                 "; it must be at least 1");
  check_not_negative("memory_bytes", memory_bytes);
  for (const auto& [name, link] : {std::pair("node", &node), std::pair("network", &network)}) {
    check_not_negative(concat(name, ".latency_seconds").c_str(), link->latency_seconds);
    check_positive(concat(name, ".bytes_per_second").c_str(), link->bytes_per_second);
  }
  RINGSPAN_CHECK(overlap >= 0 && overlap <= 1, "machine: overlap is ", overlap, "; it must be between 0 and 1");
  check_positive("copy_bytes_per_second", copy_bytes_per_second);
  check_not_negative("forward_call_seconds", forward_call_seconds);
  check_not_negative("backward_call_seconds", backward_call_seconds);
  check_not_negative("step_seconds", step_seconds);
  RINGSPAN_CHECK(!kernels.empty(), "machine: kernels is empty; give the speed of at least one dtype");
  for (const KernelSpeed& speed : kernels) {
    RINGSPAN_CHECK(speed.head_dim >= 1, "machine: kernels has head_dim ", speed.head_dim, "; it must be at least 1");
    check_positive("forward_flops_per_second", speed.forward_flops_per_second);
    check_positive("backward_flops_per_second", speed.backward_flops_per_second);
    check_not_negative("forward_row_seconds", speed.forward_row_seconds);
    check_not_negative("backward_row_seconds", speed.backward_row_seconds);
  }
}

const KernelSpeed& Machine::speed_of(DType dtype, int64_t head_dim) const {
  const KernelSpeed* best = nullptr;
  for (const KernelSpeed& speed : kernels) {
    if (speed.dtype != dtype) continue;
    if (best == nullptr || std::abs(speed.head_dim - head_dim) < std::abs(best->head_dim - head_dim)) best = &speed;
  }
  RINGSPAN_CHECK(best != nullptr, "machine \"", name, "\" gives no speed of dtype ", name_of(dtype),
                 " kernels; add one to \"kernels\"");
  return *best;
}

Machine machine_from_json(std::string_view text) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::exception& fault) {
    throw Error(concat("machine: not JSON: ", fault.what()));
  }
  Machine machine;
  Reader reader(json, "the description");
  machine_fields(reader, machine);
  reader.finish();
  machine.check();
  return machine;
}

std::string to_json(const Machine& machine) {
  Json json;
  Writer writer{json};
  machine_fields(writer, machine);
  return json.dump(2);
}

}  // namespace ringspan
