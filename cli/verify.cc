#include <iomanip>
#include <iostream>
#include <memory>

#include <nlohmann/json.hpp>

#include "cli/options.h"
#include "cli/verbs.h"
#include "cli/verify_run.h"

namespace ringspan::cli {
namespace {

struct VerifyOptions {
  QuestionOptions question;
  uint64_t seed = 0;
  int threads = 1;
  bool as_json = false;
};

void print_json(const Verification& result) {
  nlohmann::ordered_json document;
  document["met"] = result.met();
  document["isa"] = name_of(result.isa);
  for (const Comparison& c : result.comparisons) {
    document["comparisons"].push_back(
        {{"quantity", c.quantity}, {"error", c.error}, {"bound", c.bound}, {"met", c.met()}});
  }
  document["plan_faults"] = result.plan_faults;
  document["sent_bytes"] = result.sent_bytes;
  document["planned_bytes"] = result.planned_bytes;
  std::cout << document.dump(2) << "\n";
}

void print_text(const Verification& result) {
  std::cout << "kernels: " << name_of(result.isa) << "\n\nquantity        error        bound\n";
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
  for (const std::string& fault : result.plan_faults) std::cout << "plan: " << fault << "\n";
  std::cout << "\n" << (result.met() ? "verified" : "NOT verified") << "\n";
}

void run(const VerifyOptions& options, int& status) {
  const Plan plan = options.question.question().plan();
  if (!options.as_json) std::cout << plan.problem().str() << "\n" << std::flush;
  const Verification result = verify(plan, options.seed, options.threads);
  options.as_json ? print_json(result) : print_text(result);
  status = result.met() ? 0 : 1;
}

}  // namespace

void add_verify(CLI::App& app, int& status) {
  CLI::App* verb = app.add_subcommand("verify", "Run a plan on in-process ranks and compare with the double reference");
  const auto options = std::make_shared<VerifyOptions>();
  options->question.add_to(*verb);
  verb->add_option("--seed", options->seed, "Seed of the random inputs")->capture_default_str();
  verb->add_option("--threads", options->threads, "Threads per rank")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  verb->add_flag("--json", options->as_json, "Print JSON");
  verb->callback([options, &status] { run(*options, status); });
}

}  // namespace ringspan::cli
