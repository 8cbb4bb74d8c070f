#include "ringspan/sim/simulate.h"

#include <algorithm>
#include <functional>
#include <thread>
#include <utility>

#include "ringspan/base/error.h"
#include "ringspan/base/parallel.h"
#include "ringspan/plan/schedules/schedules.h"
#include "ringspan/sim/pass_cost.h"
#include "ringspan/sim/sample.h"

namespace ringspan {
namespace {

using detail::PassCost;
using detail::PassTimes;
using detail::RankCost;
using detail::RankTimes;
using detail::Sample;

SimulatedPass summed(PassTimes times, double call_seconds) {
  SimulatedPass pass{.seconds = times.seconds + call_seconds};
  const auto count = static_cast<double>(times.ranks.size());
  for (size_t r = 0; r < times.ranks.size(); ++r) {
    const RankTimes& rank = times.ranks[r];
    pass.compute_seconds += rank.compute_seconds / count;
    pass.exposed_seconds += (rank.wait_seconds + rank.copy_seconds) / count;
    pass.idle_seconds += (times.seconds - rank.end) / count;
    if (rank.end > times.ranks[pass.slowest_rank].end) pass.slowest_rank = static_cast<int64_t>(r);
  }
  pass.ranks = std::move(times.ranks);
  return pass;
}

void run_on_all_processors(int num_tasks, const std::function<void(int)>& task) {
  const int num_threads = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, num_tasks);
  ThreadPool(num_threads).run(num_tasks, task);
}

std::vector<RankCost> costs_of(const Plan& plan, const Machine& machine, Exchange exchange, const Sample& sample) {
  std::vector<RankCost> costs(sample.ranks().size());
  const auto build = [&](int index) {
    costs[index] = detail::cost_of(plan.rank(sample.ranks()[index]), exchange, machine, !sample.is_whole());
  };
  run_on_all_processors(static_cast<int>(costs.size()), build);
  return costs;
}

// Under "invariant" who needs a block differs from rank to rank: none can stand for another, and each visits all
// blocks.
int64_t most_ranks_built(const Plan& plan, const SimulateOptions& options) {
  if (plan.schedule().kind != ScheduleKind::kInvariant) return options.most_ranks_built;
  constexpr int64_t kMostSteps = 1'200'000;
  const int64_t kv_blocks = detail::num_invariant_blocks(plan.kv_map());
  const int64_t q_blocks = detail::num_invariant_blocks(plan.q_map());
  const int64_t steps = plan.world() * (2 * kv_blocks + q_blocks + 2);
  if (steps > kMostSteps) {
    throw Unsupported(concat("simulate: under schedule invariant each of ", plan.world(), " ranks visits blocks of ",
                             detail::kInvariantBlock, " positions one by one, ", steps,
                             " steps in all, of which at most ", kMostSteps,
                             " are played; simulate fewer ranks or a shorter sequence"));
  }
  return plan.world();
}

// Ranks that must stay together: those of a team or of a node.
int64_t block_of(const Schedule& schedule) { return std::max<int64_t>(1, schedule.inner); }

}  // namespace

Simulation simulate(const Plan& plan, const Machine& machine, const SimulateOptions& options) {
  machine.check();
  const Sample sample(plan.world(), block_of(plan.schedule()), most_ranks_built(plan, options));
  const std::vector<RankCost> costs = costs_of(plan, machine, options.exchange, sample);
  Simulation simulation{.ranks_built = static_cast<int64_t>(costs.size())};
  std::vector<const PassCost*> forward, backward;
  for (size_t k = 0; k < costs.size(); ++k) {
    forward.push_back(&costs[k].forward);
    backward.push_back(&costs[k].backward);
    if (costs[k].memory_bytes > simulation.memory_bytes) {
      simulation.memory_bytes = costs[k].memory_bytes;
      simulation.memory_rank = sample.ranks()[k];
    }
  }
  run_on_all_processors(2, [&](int which) {
    SimulatedPass& pass = which == 0 ? simulation.forward : simulation.backward;
    const double call_seconds = which == 0 ? machine.forward_call_seconds : machine.backward_call_seconds;
    pass = summed(play(sample, which == 0 ? forward : backward, machine, options.exchange, options.steps_of),
                  call_seconds);
  });
  simulation.fits = machine.memory_bytes == 0 || static_cast<double>(simulation.memory_bytes) <= machine.memory_bytes;
  return simulation;
}

}  // namespace ringspan
