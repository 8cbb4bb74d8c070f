// Simulations as JSON, and as a trace that Perfetto opens.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "ringspan/base/error.h"
#include "ringspan/sim/planner.h"
#include "ringspan/sim/simulate.h"

namespace ringspan {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const detail::RankTimes& rank) {
  Json json{{"compute_seconds", rank.compute_seconds},
            {"copy_seconds", rank.copy_seconds},
            {"wait_seconds", rank.wait_seconds},
            {"end", rank.end}};
  for (const detail::StepTimes& step : rank.steps) {
    json["steps"].push_back({{"step", step.step},
                             {"begin", step.begin},
                             {"compute_begin", step.compute_begin},
                             {"compute_end", step.compute_end},
                             {"end", step.end}});
  }
  return json;
}

Json json_of(const SimulatedPass& pass) {
  Json ranks = Json::array();
  for (const detail::RankTimes& rank : pass.ranks) ranks.push_back(json_of(rank));
  return {{"seconds", pass.seconds},
          {"compute_seconds", pass.compute_seconds},
          {"exposed_seconds", pass.exposed_seconds},
          {"idle_seconds", pass.idle_seconds},
          {"slowest_rank", pass.slowest_rank},
          {"ranks", std::move(ranks)}};
}

constexpr double kMicroseconds = 1e6;

void add_named(Json& events, const char* what, int64_t pass, int64_t rank, const std::string& name) {
  events.push_back({{"name", what}, {"ph", "M"}, {"pid", pass}, {"tid", rank}, {"args", {{"name", name}}}});
}

// What a rank of a pass does from one time to another.
struct Span {
  std::string name;
  const char* category;
  double begin, end;
};

void add_span(Json& events, int64_t pass, int64_t rank, const Span& span) {
  if (span.end <= span.begin) return;
  events.push_back({{"name", span.name},
                    {"cat", span.category},
                    {"ph", "X"},
                    {"pid", pass},
                    {"tid", rank},
                    {"ts", span.begin * kMicroseconds},
                    {"dur", (span.end - span.begin) * kMicroseconds}});
}

void add_pass(Json& events, const SimulatedPass& pass, int64_t number, const char* name) {
  add_named(events, "process_name", number, 0, name);
  for (size_t r = 0; r < pass.ranks.size(); ++r) {
    const auto rank = static_cast<int64_t>(r);
    if (pass.ranks[r].steps.empty()) continue;
    add_named(events, "thread_name", number, rank, concat("rank ", rank));
    double done = 0;
    for (const detail::StepTimes& step : pass.ranks[r].steps) {
      add_span(events, number, rank, {concat("wait and copy ", step.step), "exposed", done, step.compute_begin});
      add_span(events, number, rank, {concat("step ", step.step), "compute", step.compute_begin, step.compute_end});
      done = step.compute_end;
    }
    add_span(events, number, rank, {"wait and copy", "exposed", done, pass.ranks[r].end});
  }
}

}  // namespace

std::string to_json(const Simulation& simulation) {
  return Json{{"seconds", simulation.seconds()},
              {"forward", json_of(simulation.forward)},
              {"backward", json_of(simulation.backward)},
              {"memory_bytes", simulation.memory_bytes},
              {"memory_rank", simulation.memory_rank},
              {"ranks_built", simulation.ranks_built},
              {"fits", simulation.fits}}
      .dump();
}

std::string to_json(const Choice& choice) {
  Json candidates = Json::array();
  for (const Candidate& candidate : choice.candidates) {
    candidates.push_back({{"schedule", name_of(candidate.schedule)},
                          {"shard", candidate.shard},
                          {"tensor_parallel", candidate.tensor_parallel},
                          {"seconds", candidate.seconds()},
                          {"forward_seconds", candidate.forward_seconds},
                          {"backward_seconds", candidate.backward_seconds},
                          {"tensor_parallel_seconds", candidate.tensor_parallel_seconds},
                          {"exposed_seconds", candidate.exposed_seconds},
                          {"idle_seconds", candidate.idle_seconds},
                          {"memory_bytes", candidate.memory_bytes},
                          {"refused", candidate.refused}});
  }
  return Json{{"reason", choice.reason}, {"candidates", std::move(candidates)}}.dump();
}

std::string chrome_trace(const Simulation& simulation) {
  const auto has_steps = [](const detail::RankTimes& rank) { return !rank.steps.empty(); };
  RINGSPAN_CHECK(std::any_of(simulation.forward.ranks.begin(), simulation.forward.ranks.end(), has_steps),
                 "trace: the simulation kept no steps; name ranks in steps_of");
  Json events = Json::array();
  add_pass(events, simulation.forward, 0, "forward");
  add_pass(events, simulation.backward, 1, "backward");
  return Json{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}}.dump();
}

}  // namespace ringspan
