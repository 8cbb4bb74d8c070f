// Ops of the simulator and the planner. Machines come as JSON; answers are the core's JSON.
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "ringspan/sim/picture.h"
#include "ringspan/sim/planner.h"
#include "ringspan/sim/simulate.h"

#include "binding/ask/plan_question.h"
#include "binding/base/boxed_op.h"
#include "binding/base/errors.h"
#include "binding/op/call.h"

namespace ringspan::binding {
namespace {

using std::string;

Simulation simulate_question(const PlanQuestion& question, const Machine& machine, std::vector<int64_t> steps_of) {
  return simulate(question.plan, machine, {.exchange = question.exchange, .steps_of = std::move(steps_of)});
}

// The same machine with every field, or ValueError.
string machine_json(string text) { return to_json(machine_from_json(text)); }

struct SimulationQuestion {
  PlanArguments plan;
  string machine;
  std::vector<int64_t> steps_of;

  static void fields(auto& self, auto&& visit) {
    PlanArguments::fields(self.plan, visit);
    visit(FieldInfo{"machine"}, self.machine);
    visit(FieldInfo{"steps_of"}, self.steps_of);
  }
};

// What `Answer` writes of the simulation.
template <string (*Answer)(const Simulation&)>
string simulated(const SimulationQuestion& question) {
  return Answer(simulate_question(ask_plan(question.plan), machine_from_json(question.machine), question.steps_of));
}

struct PictureQuestion {
  PlanArguments plan;
  string machine;

  static void fields(auto& self, auto&& visit) {
    PlanArguments::fields(self.plan, visit);
    visit(FieldInfo{"machine"}, self.machine);
  }
};

string picture_json_of(const PictureQuestion& question) {
  const PlanQuestion asked = ask_plan(question.plan);
  const Machine known = machine_from_json(question.machine);
  const Simulation simulation = simulate_question(asked, known, pictured_ranks(asked.plan.world()));
  return picture_json(asked.plan, simulation, known, concat("exchange ", name_of(asked.exchange)));
}

// `plan.schedule` is not read: `schedules` are those to choose from.
struct ChoiceQuestion {
  PlanArguments plan;
  NameList schedules = NameList();
  string machine;
  NameList shards = NameList();
  std::vector<int64_t> tensor_parallel;
  bool backward = true;

  static void fields(auto& self, auto&& visit) {
    PlanArguments::fields(self.plan, visit);
    visit(FieldInfo{"schedules"}, self.schedules);
    visit(FieldInfo{"machine"}, self.machine);
    visit(FieldInfo{"shards"}, self.shards);
    visit(FieldInfo{"tensor_parallel"}, self.tensor_parallel);
    visit(FieldInfo{"backward"}, self.backward);
  }
};

string choose_json(const ChoiceQuestion& asked) {
  const Decoded decoded = decode_arguments(numbers_of(asked.plan.spec), asked.plan.tables);
  PlannerQuestion question{
      .problem = problem_of(decoded, asked.plan),
      .mask = decoded.mask,
      .world = decoded.world,
      .exchange = parse_exchange(asked.plan.exchange),
      .backward = asked.backward,
      .shards = asked.shards.vec(),
      .tensor_parallel = asked.tensor_parallel,
  };
  for (const string& schedule : asked.schedules.vec()) {
    question.schedules.push_back(parse_schedule_name(schedule, question.exchange));
  }
  return to_json(choose_plan(question, machine_from_json(asked.machine)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  m.def("_machine_json(str machine) -> str", kTranslated<&machine_json>);
  m.def(boxed_schema<SimulationQuestion>("_simulate_json", "str").c_str(),
        boxed<SimulationQuestion, kTranslated<&simulated<to_json>>>());
  m.def(boxed_schema<SimulationQuestion>("_trace_json", "str").c_str(),
        boxed<SimulationQuestion, kTranslated<&simulated<chrome_trace>>>());
  m.def(boxed_schema<PictureQuestion>("_picture_json", "str").c_str(),
        boxed<PictureQuestion, kTranslated<&picture_json_of>>());
  m.def(boxed_schema<ChoiceQuestion>("_choose_json", "str").c_str(),
        boxed<ChoiceQuestion, kTranslated<&choose_json>>());
}

}  // namespace ringspan::binding
