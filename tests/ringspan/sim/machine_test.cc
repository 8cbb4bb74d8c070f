#include "ringspan/sim/machine.h"

#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ringspan/base/error.h"

#include "tests/ringspan/sim/sim_cases.h"

namespace ringspan {
namespace {

using Json = nlohmann::ordered_json;

Json described() { return Json::parse(to_json(testing::round_machine())); }

std::string refusal_of(const Json& json) {
  try {
    machine_from_json(json.dump());
  } catch (const Error& fault) {
    return fault.what();
  }
  return "";
}

TEST(Machine, ComesBackFromJson) {
  Machine machine = testing::round_machine();
  machine.overlap = 0.25;
  machine.all_to_all_waits_for_all = true;
  machine.memory_bytes = 5e9;
  machine.kernels.push_back({DType::kBF16, 128, 3, 4, 5, 6});
  EXPECT_EQ(machine_from_json(to_json(machine)), machine);
}

TEST(Machine, EveryFieldMustBeThereAndNoOther) {
  const Json whole = described();
  for (const auto& [name, value] : whole.items()) {
    Json without = whole;
    without.erase(name);
    EXPECT_NE(refusal_of(without).find(concat("no field \"", name, "\"")), std::string::npos) << name;
  }
  Json more = whole;
  more["nodes"]["latency_seconds"] = 1;
  EXPECT_NE(refusal_of(more).find("\"nodes\""), std::string::npos);
  more = whole;
  more["kernels"][0]["flops"] = 1;
  EXPECT_NE(refusal_of(more).find("kernels[0] has a field \"flops\""), std::string::npos);
  EXPECT_NE(refusal_of(Json(3)).find("must be an object"), std::string::npos);
  EXPECT_THROW(machine_from_json("{"), Error);
}

TEST(Machine, BadValuesAreNamed) {
  const std::pair<const char*, Json> faults[] = {
      {"ranks_per_node", 0},      {"ranks_per_node", 1.5},
      {"processors_per_node", 0}, {"memory_bytes", -1},
      {"overlap", 1.5},           {"copy_bytes_per_second", 0},
      {"step_seconds", -1},       {"all_to_all_waits_for_all", 1},
      {"kernels", Json::array()}, {"node", Json{{"latency_seconds", 0}, {"bytes_per_second", 0}}}};
  for (const auto& [name, value] : faults) {
    Json json = described();
    json[name] = value;
    EXPECT_NE(refusal_of(json).find(name), std::string::npos) << name << " " << value;
  }
}

TEST(Machine, TakesTheSpeedOfTheNearestHeadDim) {
  Machine machine = testing::round_machine();
  machine.kernels = {{DType::kF32, 64, 1, 1, 0, 0}, {DType::kF32, 128, 2, 2, 0, 0}, {DType::kBF16, 80, 3, 3, 0, 0}};
  EXPECT_EQ(machine.speed_of(DType::kF32, 80).head_dim, 64);
  EXPECT_EQ(machine.speed_of(DType::kF32, 256).head_dim, 128);
  EXPECT_EQ(machine.speed_of(DType::kBF16, 1).head_dim, 80);
  EXPECT_THROW(machine.speed_of(DType::kF64, 64), Error);
}

}  // namespace
}  // namespace ringspan
