#include <algorithm>
#include <iomanip>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "ringspan/base/error.h"

#include "cli/options.h"
#include "cli/progress.h"
#include "cli/verbs.h"
#include "cli/verify_run.h"

namespace ringspan::cli {
namespace {

constexpr const char* kAllSchedules = "all";

struct VerifyOptions {
  QuestionOptions question;
  Terms terms;  // but the bias
  std::string bias = "none";
  uint64_t seed = 0;
  int threads = 1;
  bool as_json = false;
};

struct Run {
  Schedule schedule;
  Verification result;
};

nlohmann::ordered_json json_of(const Verification& result) {
  nlohmann::ordered_json document;
  for (const Comparison& c : result.comparisons) {
    document["comparisons"].push_back(
        {{"quantity", c.quantity}, {"error", c.error}, {"bound", c.bound}, {"met", c.met()}});
  }
  document["plan_faults"] = result.plan_faults;
  document["sent_bytes"] = result.sent_bytes;
  document["planned_bytes"] = result.planned_bytes;
  return document;
}

bool all_met(const std::vector<Run>& runs) {
  return std::all_of(runs.begin(), runs.end(), [](const Run& run) { return run.result.met(); });
}

// One schedule in the document itself, several in a list.
void print_json(const std::vector<Run>& runs, bool several) {
  nlohmann::ordered_json document = {{"met", all_met(runs)}, {"isa", name_of(current_isa())}};
  for (const Run& run : runs) {
    nlohmann::ordered_json one = {{"schedule", name_of(run.schedule)}, {"met", run.result.met()}};
    one.update(json_of(run.result));
    several ? document["schedules"].push_back(one) : document.update(one);
  }
  std::cout << document.dump(2) << "\n";
}

void print_one(const Verification& result) {
  std::cout << "kernels: " << name_of(current_isa()) << "\n\nquantity        error        bound\n";
  for (const Comparison& c : result.comparisons) {
    std::cout << std::left << std::setw(8) << c.quantity << std::right << std::scientific << std::setprecision(2)
              << std::setw(13) << c.error << std::setw(13) << c.bound << (c.met() ? "" : "   NOT MET") << "\n";
  }
  std::cout << "\nrank   bytes sent   planned\n";
  for (size_t rank = 0; rank < result.sent_bytes.size(); ++rank) {
    std::cout << std::setw(4) << rank << std::setw(13) << result.sent_bytes[rank] << std::setw(10)
              << result.planned_bytes[rank]
              << (result.sent_bytes[rank] == result.planned_bytes[rank] ? "" : "   DIFFER") << "\n";
  }
}

// A line for each schedule: the errors of all quantities, and the bytes of the rank that sends most.
void print_table(const std::vector<Run>& runs) {
  std::cout << "kernels: " << name_of(current_isa()) << "\n\n"
            << std::left << std::setw(16) << "schedule" << std::right;
  const std::vector<Comparison>& columns = runs.front().result.comparisons;
  for (const Comparison& c : columns) std::cout << std::setw(11) << c.quantity;
  std::cout << std::setw(14) << "sends, B" << "\n" << std::scientific << std::setprecision(2);
  for (const Run& run : runs) {
    const Verification& result = run.result;
    std::cout << std::left << std::setw(16) << name_of(run.schedule) << std::right;
    for (const Comparison& c : result.comparisons) std::cout << std::setw(10) << c.error << (c.met() ? " " : "!");
    std::cout << std::setw(14) << std::ranges::max(result.sent_bytes) << (result.met() ? "" : "   NOT MET")
              << (result.sent_bytes == result.planned_bytes ? "" : ", BYTES DIFFER FROM THE PLAN'S") << "\n";
  }
  std::cout << std::left << std::setw(16) << "bound" << std::right;
  for (const Comparison& c : columns) std::cout << std::setw(10) << c.bound << " ";
  std::cout << "\n";
}

void print_text(const std::vector<Run>& runs, bool several) {
  several ? print_table(runs) : print_one(runs.front().result);
  for (const Run& run : runs) {
    for (const std::string& fault : run.result.plan_faults) {
      std::cout << "plan of " << name_of(run.schedule) << ": " << fault << "\n";
    }
  }
  std::cout << "\n" << (all_met(runs) ? "verified" : "NOT verified") << "\n";
}

Terms::Bias parse_bias(const std::string& name) {
  if (name == "none") return Terms::Bias::kNone;
  if (name == "rows") return Terms::Bias::kRows;
  if (name == "shared") return Terms::Bias::kShared;
  throw Error(concat("bias \"", name, "\" is unknown; use none, rows or shared"));
}

Terms terms_of(const VerifyOptions& options) {
  Terms terms = options.terms;
  terms.bias = parse_bias(options.bias);
  RINGSPAN_CHECK(0 <= terms.dropout && terms.dropout < 1, "--dropout is ", terms.dropout,
                 "; it is a probability from 0 up to, but not, 1");
  RINGSPAN_CHECK(0 <= terms.softcap, "--softcap is ", terms.softcap, "; it is 0 (none) or positive");
  return terms;
}

void run(const VerifyOptions& options, int& status) {
  const Terms terms = terms_of(options);
  const bool several = options.question.schedule_text() == kAllSchedules;
  Question question = several ? options.question.question_with(options.question.shard_text(), name_of(Schedule::kRing))
                              : options.question.question();
  question.problem = with_terms(question.problem, terms);
  const std::vector<Schedule> schedules =
      several ? schedules_for(question.q_map.world()) : std::vector<Schedule>{question.schedule};
  std::vector<Plan> plans;  // an error comes before the first line
  for (const Schedule& schedule : schedules) {
    question.schedule = schedule;
    plans.push_back(question.plan());
  }
  if (!options.as_json) std::cout << question.problem.str() << "\n" << std::flush;
  Progress progress;
  progress.say("the reference in double");
  const Verifier verifier(question.problem, question.mask, terms, options.seed);
  std::vector<Run> runs;
  for (const Plan& plan : plans) {
    progress.say(concat(name_of(plan.schedule()), ", ", runs.size() + 1, " of ", plans.size()));
    runs.push_back({plan.schedule(), verifier.run(plan, options.threads)});
  }
  progress.clear();
  options.as_json ? print_json(runs, several) : print_text(runs, several);
  status = all_met(runs) ? 0 : 1;
}

}  // namespace

void add_verify(CLI::App& app, int& status) {
  CLI::App* verb = app.add_subcommand("verify", "Run a plan on in-process ranks and compare with the double reference");
  const auto options = std::make_shared<VerifyOptions>();
  options->question.add_to(*verb);
  CLI::Option* schedule = verb->get_option("--schedule");
  schedule->description(schedule->get_description() + "; all: every one that fits the ranks");
  verb->add_option(
          "--bias", options->bias,
          "A random additive bias with its gradient: none, rows (of its own for every query row) or shared (by "
          "all rows)")
      ->capture_default_str();
  verb->add_flag("--mask-tensor", options->terms.mask, "And a random boolean mask");
  verb->add_flag("--alibi", options->terms.slopes, "A slope by distance for every head");
  verb->add_option("--softcap", options->terms.softcap, "Of the scores; 0 = none")->capture_default_str();
  verb->add_option("--dropout", options->terms.dropout, "Probability that a pair is dropped")->capture_default_str();
  verb->add_flag("--sink", options->terms.sink, "A random logit per head, with its gradient");
  verb->add_flag("--lse-gradient", options->terms.lse_gradient, "A random gradient flows into lse too");
  verb->add_option("--seed", options->seed, "Seed of the random inputs and of dropout")->capture_default_str();
  verb->add_option("--threads", options->threads, "Threads per rank")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  verb->add_flag("--json", options->as_json, "Print JSON");
  verb->callback([options, &status] { run(*options, status); });
}

}  // namespace ringspan::cli
