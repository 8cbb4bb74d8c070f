#include "ringspan/ledger/ledger.h"

#include <iomanip>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/options.h"
#include "cli/progress.h"
#include "cli/summary.h"
#include "cli/verbs.h"

namespace ringspan::cli {
namespace {

constexpr const char* kTransfers = "transfers";

struct LedgerOptions {
  QuestionOptions question;
  std::string exchange = "auto";
  std::optional<int64_t> rank;
  bool as_json = false, all_ranks = false;
};

int64_t sent_of(const PassLedger& pass, Payload payload) {
  int64_t bytes = 0;
  for (const StepLedger& step : pass.steps) {
    for (const SentTensor& tensor : step.sent) bytes += tensor.payload == payload ? tensor.bytes : 0;
  }
  return bytes;
}

// Of all tensors that have no column.
int64_t sent_besides(const PassLedger& pass, const std::vector<Payload>& columns) {
  int64_t bytes = pass.sent_bytes();
  for (const Payload payload : columns) bytes -= sent_of(pass, payload);
  return bytes;
}

void print_header(const char* first) {
  std::cout << std::setw(5) << first << "  pass    " << std::setw(14) << "k, B" << std::setw(14) << "v, B"
            << std::setw(14) << "dk, B" << std::setw(14) << "dv, B" << std::setw(14) << "other, B" << std::setw(10)
            << "messages" << std::setw(16) << "pairs" << std::setw(12) << "Gflop" << std::setw(15) << "peak, B" << "\n";
}

void print_pass(int64_t number, const char* name, const PassLedger& pass, const std::string& peak,
                const std::string& why = "") {
  std::cout << std::setw(5) << number << "  " << std::left << std::setw(8) << name << std::right;
  const std::vector<Payload> columns = {Payload::kK, Payload::kV, Payload::kDk, Payload::kDv};
  for (const Payload payload : columns) std::cout << std::setw(14) << sent_of(pass, payload);
  std::cout << std::setw(14) << sent_besides(pass, columns) << std::setw(10) << pass.messages() << std::setw(16)
            << pass.kept_pairs() << std::setw(12) << std::fixed << std::setprecision(3)
            << static_cast<double>(pass.flops()) / 1e9 << std::setw(15) << peak << (why.empty() ? "" : "  " + why)
            << "\n";
}

// A line for each pass, or for each of its steps.
void print_rank(const RankLedger& ledger, bool by_step) {
  for (const auto& [name, pass] : {std::pair("forward", &ledger.forward), std::pair("backward", &ledger.backward)}) {
    if (!by_step) print_pass(ledger.rank, name, *pass, std::to_string(pass->peak_bytes));
    for (const StepLedger& step : pass->steps) {
      if (by_step) print_pass(step.step, name, PassLedger{.steps = {step}}, "");
    }
  }
}

void print_summary(const Plan& plan, const std::optional<Exchange>& posted) {
  std::vector<Measure> measures;
  for (const char* name : {"bytes sent forward", "bytes sent backward", "pairs", "flops forward", "flops backward",
                           "peak bytes forward", "peak bytes backward"}) {
    measures.emplace_back(name);
  }
  {
    Progress progress;
    for (int64_t rank = 0; rank < plan.world(); ++rank) {
      progress.count("rank", rank, plan.world());
      const RankLedger ledger = ledger_of(plan.rank(rank), posted);
      const PassLedger &forward = ledger.forward, &backward = ledger.backward;
      const int64_t values[] = {forward.sent_bytes(), backward.sent_bytes(), forward.kept_pairs(), forward.flops(),
                                backward.flops(),     forward.peak_bytes,    backward.peak_bytes};
      for (size_t k = 0; k < measures.size(); ++k) measures[k].add(values[k]);
    }
  }
  for (const Pick& pick : picks_of(plan.world(), measures)) {
    const RankLedger ledger = ledger_of(plan.rank(pick.rank), posted);
    print_pass(pick.rank, "forward", ledger.forward, std::to_string(ledger.forward.peak_bytes), pick.why);
    print_pass(pick.rank, "backward", ledger.backward, std::to_string(ledger.backward.peak_bytes));
  }
  std::cout << "\n" << summary_of(plan.world(), measures);
}

void print_json(const Plan& plan, const std::string& exchange, const std::vector<int64_t>& ranks,
                const std::optional<Exchange>& posted) {
  std::cout << "{\"world\":" << plan.world() << ",\"schedule\":\"" << name_of(plan.schedule()) << "\",\"exchange\":\""
            << exchange << "\",\"ranks\":[";
  Progress progress;
  for (const int64_t rank : ranks) {
    progress.count("rank", rank, plan.world());
    std::cout << (rank == ranks.front() ? "" : ",") << to_json(ledger_of(plan.rank(rank), posted));
  }
  std::cout << "]}\n";
}

void run(const LedgerOptions& options) {
  Question question = options.question.question();
  std::optional<Exchange> posted;
  if (options.exchange != kTransfers) {
    posted = parse_exchange(options.exchange);
    check_exchange(*posted, question.schedule);
    question.grad_route = route_of(*posted, question.q_map.world());
  }
  const std::string exchange(posted ? name_of(*posted) : kTransfers);
  const Plan plan = question.plan();
  if (options.rank) plan.rank(*options.rank);  // an error comes before the first line
  std::vector<int64_t> ranks;
  for (int64_t rank = options.rank.value_or(0); rank <= options.rank.value_or(plan.world() - 1); ++rank) {
    ranks.push_back(rank);
  }
  if (options.as_json) {
    print_json(plan, exchange, ranks, posted);
    return;
  }
  std::cout << name_of(plan.schedule()) << " over " << plan.world() << (plan.world() == 1 ? " rank" : " ranks")
            << ", exchange " << exchange << ": " << plan.problem().str() << "\nmask " << options.question.mask_text()
            << ", shard " << options.question.shard_text() << "\n\n";
  print_header(options.rank ? "step" : "rank");
  if (std::ssize(ranks) > kMostRanks && !options.all_ranks) {
    print_summary(plan, posted);
  } else {
    for (const int64_t rank : ranks) print_rank(ledger_of(plan.rank(rank), posted), options.rank.has_value());
  }
  std::cout << "\nbytes are what a rank sends; pairs are of all batch entries and one head, Gflop of the heads that it "
               "computes; peak is\nwhat lives beside the caller's tensors and the kernels' workspace\n";
}

}  // namespace

void add_ledger(CLI::App& app, int&) {
  CLI::App* verb = app.add_subcommand("ledger", "Bytes, messages, pairs, flops and memory of every rank");
  const auto options = std::make_shared<LedgerOptions>();
  options->question.add_to(*verb);
  verb->add_option("--exchange", options->exchange,
                   exchange_help() +
                       ", as PyTorch's groups post; transfers, as the core's transports do: p2p by either --grad-route")
      ->capture_default_str();
  CLI::Option* rank = verb->add_option("--rank", options->rank, "Only this rank, step by step");
  verb->add_flag("--all-ranks", options->all_ranks, "Every rank, also of more than 64")->excludes(rank);
  verb->add_flag("--json", options->as_json, "Print JSON");
  verb->callback([options] { run(*options); });
}

}  // namespace ringspan::cli
