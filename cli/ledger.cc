#include "ringspan/ledger/ledger.h"

#include <iomanip>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "cli/options.h"
#include "cli/verbs.h"

namespace ringspan::cli {
namespace {

constexpr const char* kTransfers = "transfers";

struct LedgerOptions {
  QuestionOptions question;
  std::string exchange = "auto";
  std::optional<int64_t> rank;
  bool as_json = false;
};

int64_t sent_of(const PassLedger& pass, Payload payload) {
  int64_t bytes = 0;
  for (const StepLedger& step : pass.steps) {
    for (const SentTensor& tensor : step.sent) bytes += tensor.payload == payload ? tensor.bytes : 0;
  }
  return bytes;
}

void print_header(const char* first) {
  std::cout << std::setw(5) << first << "  pass    " << std::setw(14) << "k, B" << std::setw(14) << "v, B"
            << std::setw(14) << "dk, B" << std::setw(14) << "dv, B" << std::setw(10) << "messages" << std::setw(16)
            << "pairs" << std::setw(12) << "Gflop" << std::setw(15) << "peak, B" << "\n";
}

template <class Sent>
void print_line(int64_t number, const char* pass, Sent&& sent, int64_t messages, int64_t pairs, int64_t flops,
                const std::string& peak) {
  std::cout << std::setw(5) << number << "  " << std::left << std::setw(8) << pass << std::right;
  for (const Payload payload : {Payload::kK, Payload::kV, Payload::kDk, Payload::kDv}) {
    std::cout << std::setw(14) << sent(payload);
  }
  std::cout << std::setw(10) << messages << std::setw(16) << pairs << std::setw(12) << std::fixed
            << std::setprecision(3) << static_cast<double>(flops) / 1e9 << std::setw(15) << peak << "\n";
}

void print_rank(const RankLedger& ledger) {
  const std::pair<const char*, const PassLedger*> passes[] = {{"forward", &ledger.forward},
                                                              {"backward", &ledger.backward}};
  for (const auto& [name, pass] : passes) {
    print_line(
        ledger.rank, name, [&](Payload payload) { return sent_of(*pass, payload); }, pass->messages(),
        pass->kept_pairs(), pass->flops(), std::to_string(pass->peak_bytes));
  }
}

// One rank step by step.
void print_steps(const RankLedger& ledger) {
  const std::pair<const char*, const PassLedger*> passes[] = {{"forward", &ledger.forward},
                                                              {"backward", &ledger.backward}};
  for (const auto& [name, pass] : passes) {
    for (const StepLedger& step : pass->steps) {
      const auto sent = [&](Payload payload) {
        int64_t bytes = 0;
        for (const SentTensor& tensor : step.sent) bytes += tensor.payload == payload ? tensor.bytes : 0;
        return bytes;
      };
      print_line(step.step, name, sent, step.messages, step.kept_pairs, step.flops, "");
    }
  }
}

void print_json(const Plan& plan, const std::string& exchange, const std::vector<int64_t>& ranks,
                const std::optional<Exchange>& posted) {
  std::cout << "{\"world\":" << plan.world() << ",\"schedule\":\"" << name_of(plan.schedule()) << "\",\"exchange\":\""
            << exchange << "\",\"ranks\":[";
  for (const int64_t rank : ranks) {
    std::cout << (rank == ranks.front() ? "" : ",") << to_json(ledger_of(plan.rank(rank), posted));
  }
  std::cout << "]}\n";
}

void run(const LedgerOptions& options) {
  Question question = options.question.question();
  std::optional<Exchange> posted;
  if (options.exchange != kTransfers) {
    posted = parse_exchange(options.exchange);
    question.grad_route = route_of(*posted, question.q_map.world());
  }
  const std::string exchange = posted ? name_of(*posted) : kTransfers;
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
  for (const int64_t rank : ranks) {
    const RankLedger ledger = ledger_of(plan.rank(rank), posted);
    options.rank ? print_steps(ledger) : print_rank(ledger);
  }
  std::cout
      << "\nbytes are what a rank sends; pairs are of all batch entries and one head, Gflop of all heads; peak is "
         "what lives\nbeside the caller's tensors and the kernels' workspace\n";
}

}  // namespace

void add_ledger(CLI::App& app, int&) {
  CLI::App* verb = app.add_subcommand("ledger", "Bytes, messages, pairs, flops and memory of every rank");
  const auto options = std::make_shared<LedgerOptions>();
  options->question.add_to(*verb);
  verb->add_option("--exchange", options->exchange,
                   "auto, all_to_all, p2p or all_gather as PyTorch's groups post them; transfers, one by one, as the "
                   "core's transports do")
      ->capture_default_str();
  verb->add_option("--rank", options->rank, "Only this rank, step by step");
  verb->add_flag("--json", options->as_json, "Print JSON");
  verb->callback([options] { run(*options); });
}

}  // namespace ringspan::cli
