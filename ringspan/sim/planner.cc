#include "ringspan/sim/planner.h"

#include <algorithm>
#include <iomanip>
#include <numeric>
#include <sstream>

#include "ringspan/base/error.h"
#include "ringspan/shard/map_kinds.h"

namespace ringspan {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

// Teams of as many ranks as have heads; nodes as the machine has them. "invariant" is for equal bits, not for speed.
std::vector<Schedule> schedules_to_try(const PlannerQuestion& question, const Machine& machine, int64_t world,
                                       const Problem& problem) {
  std::vector<Schedule> tried;
  for (const Schedule& schedule : question.schedules.empty() ? schedules_for(world) : question.schedules) {
    const bool has_heads = schedule.kind != ScheduleKind::kHybrid || schedule.inner <= problem.q_heads;
    const bool is_node = schedule.kind != ScheduleKind::kDoubleRing || schedule.inner == machine.ranks_per_node;
    const bool splits_enough = schedule.kind != ScheduleKind::kUlysses || world <= 2 * problem.q_heads;
    const bool is_fast = schedule.kind != ScheduleKind::kInvariant;
    const bool is_carried = carries(question.exchange, schedule);
    if (!question.schedules.empty() || (has_heads && is_node && splits_enough && is_fast && is_carried)) {
      tried.push_back(schedule);
    }
  }
  return tried;
}

// Part of the machine that one CP group sees when `tensor_parallel` neighbours split heads.
Machine seen_by_group(const Machine& machine, int64_t tensor_parallel) {
  Machine seen = machine;
  seen.ranks_per_node = std::max<int64_t>(1, machine.ranks_per_node / tensor_parallel);
  seen.processors_per_node = std::max<int64_t>(1, machine.processors_per_node / tensor_parallel);
  return seen;
}

// Activations [batch, rows, hidden] are gathered before the projections and scattered, summed, after them: twice
// (T - 1) / T of them in each pass (sequence parallelism of Megatron-LM, arXiv:2205.05198, section 4.2).
double tensor_parallel_seconds(const Problem& problem, int64_t world, int64_t tensor_parallel, const Machine& machine) {
  if (tensor_parallel == 1) return 0;
  const LinkClass& link = tensor_parallel <= machine.ranks_per_node ? machine.node : machine.network;
  const auto ranks = static_cast<double>(tensor_parallel);
  const double rows = static_cast<double>(problem.batch * problem.q_len) * ranks / static_cast<double>(world);
  const double bytes = rows * static_cast<double>(problem.q_heads * problem.qk_dim * size_of(problem.dtype));
  return 2 * ((ranks - 1) * link.latency_seconds + (ranks - 1) / ranks * bytes / link.bytes_per_second);
}

std::string gib(double bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << bytes / kGiB << " GiB";
  return text.str();
}

std::string milliseconds(double seconds) {
  std::ostringstream text;
  text << std::setprecision(4) << seconds * 1e3 << " ms";
  return text.str();
}

std::string name_of_candidate(const Candidate& candidate) {
  const std::string mesh =
      candidate.tensor_parallel > 1 ? concat(", tensor parallel ", candidate.tensor_parallel) : std::string();
  return concat(name_of(candidate.schedule), " over ", candidate.shard, mesh);
}

class Planner {
 public:
  Planner(const PlannerQuestion& question, const Machine& machine) : question_(question), machine_(machine) {}

  std::vector<Candidate> candidates() const {
    std::vector<Candidate> found;
    std::vector<std::string> shards = question_.shards;
    if (shards.empty()) shards = plain_map_names();
    for (const int64_t ranks : question_.tensor_parallel) {
      RINGSPAN_CHECK(ranks >= 1, "planner: tensor_parallel is ", ranks, "; it must be at least 1");
      const std::string misfit = misfit_of(ranks);
      if (!misfit.empty()) {
        found.push_back({.tensor_parallel = ranks, .refused = misfit});
        continue;
      }
      const Machine seen = seen_by_group(machine_, ranks);
      const Problem problem = problem_of(ranks);
      const std::vector<std::string> different = different_maps(shards, question_.world / ranks);
      for (const Schedule& schedule : schedules_to_try(question_, seen, question_.world / ranks, problem)) {
        for (const std::string& shard : different) {
          found.push_back({.schedule = schedule, .shard = shard, .tensor_parallel = ranks});
        }
      }
    }
    return found;
  }

  // Fills in the figures, or the reason why there are none.
  void judge(Candidate& candidate) const {
    if (!candidate.refused.empty()) return;
    const int64_t world = question_.world / candidate.tensor_parallel;
    const Problem problem = problem_of(candidate.tensor_parallel);
    try {
      const ShardMap q_map = parse_shard_map(candidate.shard, question_.mask, problem.q_len, world);
      const ShardMap kv_map = problem.kv_len == problem.q_len
                                  ? q_map
                                  : parse_shard_map(candidate.shard, question_.mask, problem.kv_len, world);
      const Plan plan =
          build_plan(problem, question_.mask, q_map, kv_map, candidate.schedule, route_of(question_.exchange, world));
      simulate_into(candidate, plan);
    } catch (const Error& fault) {
      candidate.refused = fault.what();
    }
  }

 private:
  // Without those whose map equals an earlier one's; one that cannot be made is kept, and refused later.
  std::vector<std::string> different_maps(const std::vector<std::string>& names, int64_t world) const {
    std::vector<std::string> different;
    std::vector<ShardMap> maps;
    for (const std::string& name : names) {
      try {
        const ShardMap map = parse_shard_map(name, question_.mask, question_.problem.q_len, world);
        if (std::find(maps.begin(), maps.end(), map) != maps.end()) continue;
        maps.push_back(map);
        different.push_back(name);
      } catch (const Error&) {
        different.push_back(name);  // its candidates will say why
      }
    }
    return different;
  }

  std::string misfit_of(int64_t ranks) const {
    const Problem& p = question_.problem;
    if (question_.world % ranks != 0) return concat(ranks, " does not divide the world of ", question_.world, " ranks");
    if (p.kv_heads % ranks == 0) return "";
    return concat("tensor parallel ", ranks, " does not divide ", p.kv_heads, " KV heads");
  }

  Problem problem_of(int64_t tensor_parallel) const {
    Problem problem = question_.problem;
    problem.q_heads /= tensor_parallel;
    problem.kv_heads /= tensor_parallel;
    return problem;
  }

  void simulate_into(Candidate& candidate, const Plan& plan) const {
    const Machine seen = seen_by_group(machine_, candidate.tensor_parallel);
    const Simulation simulation = simulate(plan, seen, {.exchange = question_.exchange});
    const double extra =
        tensor_parallel_seconds(question_.problem, question_.world, candidate.tensor_parallel, machine_);
    candidate.forward_seconds = simulation.forward.seconds + extra;
    candidate.backward_seconds = question_.backward ? simulation.backward.seconds + extra : 0;
    candidate.tensor_parallel_seconds = question_.backward ? 2 * extra : extra;
    candidate.exposed_seconds = simulation.forward.exposed_seconds;
    candidate.idle_seconds = simulation.forward.idle_seconds;
    if (question_.backward) {
      candidate.exposed_seconds += simulation.backward.exposed_seconds;
      candidate.idle_seconds += simulation.backward.idle_seconds;
    }
    candidate.memory_bytes = simulation.memory_bytes;
    if (!simulation.fits) {
      candidate.refused = concat("needs ", gib(static_cast<double>(simulation.memory_bytes)), " on rank ",
                                 simulation.memory_rank, "; a rank has ", gib(machine_.memory_bytes));
    }
  }

  const PlannerQuestion& question_;
  const Machine& machine_;
};

std::string reason_of(const std::vector<Candidate>& candidates) {
  const auto num_refused = std::count_if(candidates.begin(), candidates.end(),
                                         [](const Candidate& candidate) { return !candidate.refused.empty(); });
  const auto num_fit = static_cast<int64_t>(candidates.size()) - num_refused;
  if (candidates.empty()) return "there was nothing to choose from";
  if (num_fit == 0) return concat("nothing fits: ", name_of_candidate(candidates[0]), ": ", candidates[0].refused);
  const Candidate& best = candidates[0];
  std::ostringstream text;
  text << name_of_candidate(best) << ": " << milliseconds(best.seconds()) << ", of which messages and copies show "
       << milliseconds(best.exposed_seconds) << " and ranks wait at the end " << milliseconds(best.idle_seconds)
       << " (means); it holds " << gib(static_cast<double>(best.memory_bytes)) << ".";
  if (num_fit > 1) {
    const Candidate& next = candidates[1];
    text << " Next is " << name_of_candidate(next) << ", " << std::fixed << std::setprecision(1)
         << 100 * (next.seconds() / best.seconds() - 1) << " % slower (" << milliseconds(next.exposed_seconds)
         << " and " << milliseconds(next.idle_seconds) << ").";
  }
  if (num_refused > 0) text << " " << num_refused << " of " << candidates.size() << " were refused.";
  return text.str();
}

}  // namespace

Choice choose_plan(const PlannerQuestion& question, const Machine& machine,
                   const std::function<void(int64_t, int64_t)>& progress) {
  machine.check();
  question.problem.check();
  RINGSPAN_CHECK(question.world >= 1, "planner: world is ", question.world, "; it must be at least 1");
  const Planner planner(question, machine);
  Choice choice{.candidates = planner.candidates(), .reason = {}};
  int64_t done = 0;
  for (Candidate& candidate : choice.candidates) {
    planner.judge(candidate);
    if (progress) progress(++done, static_cast<int64_t>(choice.candidates.size()));
  }
  std::stable_sort(choice.candidates.begin(), choice.candidates.end(), [](const Candidate& a, const Candidate& b) {
    return std::pair(!a.refused.empty(), a.seconds()) < std::pair(!b.refused.empty(), b.seconds());
  });
  choice.reason = reason_of(choice.candidates);
  return choice;
}

}  // namespace ringspan
