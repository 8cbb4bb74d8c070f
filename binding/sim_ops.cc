// Ops of the simulator and the planner. Machines come as JSON; answers are the core's JSON.
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "ringspan/sim/picture.h"
#include "ringspan/sim/planner.h"
#include "ringspan/sim/simulate.h"

#include "binding/call.h"
#include "binding/errors.h"
#include "binding/plan_question.h"

namespace ringspan::binding {
namespace {

using std::string;

Simulation simulate_question(const PlanQuestion& question, const Machine& machine, std::vector<int64_t> steps_of) {
  return simulate(question.plan, machine, {.exchange = question.exchange, .steps_of = std::move(steps_of)});
}

// The same machine with every field, or ValueError.
string machine_json(string text) {
  return translate_errors([&] { return to_json(machine_from_json(text)); });
}

// What `Answer` writes of the simulation.
template <string (*Answer)(const Simulation&)>
string simulated(at::IntArrayRef spec, at::TensorList tables, int64_t q_heads, int64_t kv_heads, int64_t qk_dim,
                 int64_t v_dim, string dtype, double scale, string layout, string schedule, string exchange,
                 string machine, at::IntArrayRef steps_of) {
  return translate_errors([&] {
    const PlanQuestion question =
        ask_plan(spec, tables, q_heads, kv_heads, qk_dim, v_dim, dtype, scale, layout, schedule, exchange);
    return Answer(simulate_question(question, machine_from_json(machine), steps_of.vec()));
  });
}

string picture_json_of(at::IntArrayRef spec, at::TensorList tables, int64_t q_heads, int64_t kv_heads, int64_t qk_dim,
                       int64_t v_dim, string dtype, double scale, string layout, string schedule, string exchange,
                       string machine) {
  return translate_errors([&] {
    const PlanQuestion question =
        ask_plan(spec, tables, q_heads, kv_heads, qk_dim, v_dim, dtype, scale, layout, schedule, exchange);
    const Machine known = machine_from_json(machine);
    const Simulation simulation = simulate_question(question, known, pictured_ranks(question.plan.world()));
    return picture_json(question.plan, simulation, known, concat("exchange ", name_of(question.exchange)));
  });
}

string choose_json(at::IntArrayRef spec, at::TensorList tables, int64_t q_heads, int64_t kv_heads, int64_t qk_dim,
                   int64_t v_dim, string dtype, double scale, string layout, std::vector<string> schedules,
                   string exchange, string machine, std::vector<string> shards, at::IntArrayRef tensor_parallel,
                   bool backward) {
  return translate_errors([&] {
    const Decoded decoded = decode_arguments(spec, tables);
    PlannerQuestion question{
        .problem = problem_of(decoded, q_heads, kv_heads, qk_dim, v_dim, dtype, scale, layout),
        .mask = decoded.mask,
        .world = decoded.world,
        .exchange = parse_exchange(exchange),
        .backward = backward,
        .shards = shards,
        .tensor_parallel = tensor_parallel.vec(),
    };
    for (const string& schedule : schedules) question.schedules.push_back(parse_schedule_name(schedule));
    return to_json(choose_plan(question, machine_from_json(machine)));
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  const string plan(kPlanArguments);
  m.def("_machine_json(str machine) -> str", &machine_json);
  m.def(("_simulate_json(" + plan + ", str machine, int[] steps_of) -> str").c_str(), &simulated<to_json>);
  m.def(("_trace_json(" + plan + ", str machine, int[] steps_of) -> str").c_str(), &simulated<chrome_trace>);
  m.def(("_picture_json(" + plan + ", str machine) -> str").c_str(), &picture_json_of);
  m.def(
      "_choose_json(SymInt[] spec, Tensor[] tables, int q_heads, int kv_heads, int qk_dim, int v_dim, str dtype, "
      "float scale, str layout, str[] schedules, str exchange, str machine, str[] shards, int[] tensor_parallel, "
      "bool backward) -> str",
      &choose_json);
}

}  // namespace ringspan::binding
