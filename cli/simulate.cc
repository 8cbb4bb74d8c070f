#include "ringspan/sim/simulate.h"

#include <fstream>
#include <iomanip>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ringspan/base/error.h"
#include "ringspan/sim/picture.h"
#include "ringspan/sim/planner.h"

#include "cli/options.h"
#include "cli/progress.h"
#include "cli/python_verbs.h"
#include "cli/verbs.h"

namespace ringspan::cli {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;
constexpr int64_t kMostTracedRanks = 256;
constexpr size_t kMostStepsShown = 64;
constexpr int64_t kMostCandidatesShown = 20;
constexpr const char* kAuto = "auto";

struct SimulateArguments {
  QuestionOptions question;
  std::string machine, exchange = kAuto, trace, plot;
  std::vector<int64_t> tensor_parallel{1};
  int64_t rank = 0;
  bool forward_only = false, as_json = false;
};

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  RINGSPAN_CHECK(file, "--machine: cannot read ", path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  RINGSPAN_CHECK(file, "--trace: cannot write ", path);
}

std::string memory_text(double bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(bytes < kGiB ? 4 : 2) << bytes / kGiB << " GiB";
  return text.str();
}

void print_ms(double seconds) { std::cout << std::setw(13) << std::fixed << std::setprecision(3) << seconds * 1e3; }

void print_pass(const char* name, const SimulatedPass& pass) {
  std::cout << std::left << std::setw(9) << name << std::right;
  for (const double seconds : {pass.seconds, pass.compute_seconds, pass.exposed_seconds, pass.idle_seconds}) {
    print_ms(seconds);
  }
  std::cout << std::setw(14) << pass.slowest_rank << "\n";
}

void print_steps(const char* name, const SimulatedPass& pass, int64_t rank) {
  const std::vector<detail::StepTimes>& steps = pass.ranks[rank].steps;
  std::cout << "\n"
            << name << " of rank " << rank << ", ms since the pass began\n step      begins    computes from"
            << "           to\n";
  for (size_t s = 0; s < std::min(steps.size(), kMostStepsShown); ++s) {
    std::cout << std::setw(5) << steps[s].step;
    print_ms(steps[s].begin);
    std::cout << "   ";
    print_ms(steps[s].compute_begin);
    print_ms(steps[s].compute_end);
    std::cout << "\n";
  }
  if (steps.size() > kMostStepsShown) {
    std::cout << "  ... " << steps.size() - kMostStepsShown << " more; --json has them\n";
  }
}

void print_simulation(const Plan& plan, const Machine& machine, const Simulation& simulation, int64_t rank) {
  std::cout << "\n              total, ms      compute      exposed         idle  slowest rank\n";
  print_pass("forward", simulation.forward);
  print_pass("backward", simulation.backward);
  std::cout << "both     ";
  print_ms(simulation.seconds());
  std::cout
      << "\n\ncompute, exposed (waiting for messages, copying) and idle (done before the last rank) are means over "
         "ranks\nmemory: "
      << memory_text(static_cast<double>(simulation.memory_bytes)) << " on rank " << simulation.memory_rank;
  if (machine.memory_bytes > 0) {
    std::cout << ", which " << (simulation.fits ? "fits in " : "DOES NOT FIT in ") << memory_text(machine.memory_bytes);
  }
  std::cout << "\n";
  if (simulation.ranks_built < plan.world()) {
    std::cout << "estimated from " << simulation.ranks_built << " of " << plan.world() << " ranks\n";
  }
  print_steps("forward", simulation.forward, rank);
  print_steps("backward", simulation.backward, rank);
}

void print_choice(const Choice& choice) {
  std::cout << "\nschedule          shard        TP     total, ms     forward     backward      exposed         idle   "
               "memory\n";
  int64_t shown = 0, more = 0;
  for (const Candidate& candidate : choice.candidates) {
    if (candidate.refused.empty() && ++shown > kMostCandidatesShown) {
      ++more;
      continue;
    }
    std::cout << std::left << std::setw(18) << (candidate.shard.empty() ? "-" : name_of(candidate.schedule))
              << std::setw(11) << candidate.shard << std::right << std::setw(4) << candidate.tensor_parallel;
    if (candidate.seconds() > 0) {
      for (const double seconds : {candidate.seconds(), candidate.forward_seconds, candidate.backward_seconds,
                                   candidate.exposed_seconds, candidate.idle_seconds}) {
        print_ms(seconds);
      }
      std::cout << std::setw(14) << memory_text(static_cast<double>(candidate.memory_bytes));
    }
    std::cout << (candidate.refused.empty() ? "" : "  refused: ") << candidate.refused << "\n";
  }
  if (more > 0) std::cout << "... and " << more << " slower ones; --json has them\n";
  std::cout << "\n" << choice.reason << "\n";
}

void choose(const SimulateArguments& arguments, const Machine& machine, int& status) {
  const bool any_shard = arguments.question.shard_text() == kAuto;
  const bool any_schedule = arguments.question.schedule_text() == kAuto;
  for (const auto& [option, file] : {std::pair("--trace ", &arguments.trace), std::pair("--plot ", &arguments.plot)}) {
    RINGSPAN_CHECK(file->empty(), option, *file,
                   " is of one plan; name --schedule and --shard, and leave --tensor-parallel");
  }
  const Question asked = arguments.question.question_with(any_shard ? "contiguous" : arguments.question.shard_text(),
                                                          any_schedule ? "ring" : arguments.question.schedule_text());
  PlannerQuestion question{.problem = asked.problem,
                           .mask = asked.mask,
                           .world = arguments.question.world(),
                           .exchange = parse_exchange(arguments.exchange),
                           .backward = !arguments.forward_only,
                           .tensor_parallel = arguments.tensor_parallel};
  if (!any_schedule) question.schedules = {asked.schedule};
  if (!any_shard) question.shards = {arguments.question.shard_text()};
  Progress progress;
  const Choice choice =
      choose_plan(question, machine, [&](int64_t done, int64_t all) { progress.count("candidate", done, all); });
  progress.clear();
  if (arguments.as_json) {
    std::cout << to_json(choice) << "\n";
  } else {
    std::cout << arguments.question.world() << " ranks on " << machine.name << ": " << asked.problem.str() << "\nmask "
              << arguments.question.mask_text() << "\n";
    print_choice(choice);
  }
  if (!choice.is_found()) status = 1;
}

void simulate_one(const SimulateArguments& arguments, const Machine& machine, int& status) {
  Question question = arguments.question.question();
  const Exchange exchange = parse_exchange(arguments.exchange);
  question.grad_route = route_of(exchange, question.q_map.world());
  const Plan plan = question.plan();
  SimulateOptions options{.exchange = exchange, .steps_of = {arguments.rank}};
  if (!arguments.trace.empty()) {
    options.steps_of.resize(std::min(plan.world(), kMostTracedRanks));
    std::iota(options.steps_of.begin(), options.steps_of.end(), int64_t{0});
    options.steps_of.push_back(arguments.rank);
  }
  if (!arguments.plot.empty()) {
    const std::vector<int64_t> shown = pictured_ranks(plan.world());
    options.steps_of.insert(options.steps_of.end(), shown.begin(), shown.end());
  }
  const Simulation simulation = simulate(plan, machine, options);
  if (!arguments.trace.empty()) write_file(arguments.trace, chrome_trace(simulation));
  if (arguments.as_json) {
    std::cout << to_json(simulation) << "\n";
  } else {
    std::cout << name_of(plan.schedule()) << " over " << plan.world() << (plan.world() == 1 ? " rank" : " ranks")
              << ", exchange " << name_of(exchange) << ", on " << machine.name << ": " << plan.problem().str()
              << "\nmask " << arguments.question.mask_text() << ", shard " << arguments.question.shard_text() << "\n";
    print_simulation(plan, machine, simulation, arguments.rank);
  }
  if (!arguments.plot.empty()) {
    draw_picture(picture_json(plan, simulation, machine, arguments.question.note()), arguments.plot);
  }
  if (!simulation.fits) status = 1;
}

void run(const SimulateArguments& arguments, int& status) {
  const Machine machine = machine_from_json(read_file(arguments.machine));
  const bool chooses = arguments.question.schedule_text() == kAuto || arguments.question.shard_text() == kAuto ||
                       arguments.tensor_parallel != std::vector<int64_t>{1};
  if (chooses) {
    choose(arguments, machine, status);
  } else {
    simulate_one(arguments, machine, status);
  }
}

}  // namespace

void add_simulate(CLI::App& app, int& status) {
  CLI::App* verb = app.add_subcommand("simulate", "How long a call takes on a machine, and the best way to run it");
  const auto arguments = std::make_shared<SimulateArguments>();
  arguments->question.add_to(*verb);
  verb->add_option("--machine", arguments->machine,
                   "JSON description; `ringspan fit` writes one, python/ringspan/machines has more")
      ->required();
  verb->add_option("--exchange", arguments->exchange, exchange_help())->capture_default_str();
  verb->add_option("--tensor-parallel", arguments->tensor_parallel,
                   "Numbers of neighbouring ranks that split heads, such as 1,2,4: the planner tries each")
      ->delimiter(',');
  verb->add_option("--rank", arguments->rank, "Whose steps are shown")->capture_default_str();
  verb->add_option("--trace", arguments->trace, "Write a timeline that Perfetto opens, of the first 256 ranks at most");
  verb->add_option("--plot", arguments->plot, "Draw the mask, who holds what, and who computes when (FILE.png)");
  verb->add_flag("--forward-only", arguments->forward_only, "The planner leaves backward out");
  verb->add_flag("--json", arguments->as_json, "Print JSON");
  verb->footer("--schedule auto and --shard auto let the planner choose; status 1: it does not fit in memory");
  verb->callback([arguments, &status] { run(*arguments, status); });
}

}  // namespace ringspan::cli
