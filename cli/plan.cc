#include "ringspan/plan/plan.h"

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "cli/options.h"
#include "cli/verbs.h"

namespace ringspan::cli {
namespace {

constexpr int64_t kWidestPicture = 64;
constexpr int64_t kMostDigits = 36;

struct PlanOptions {
  QuestionOptions question;
  std::optional<int64_t> rank;
  bool as_json = false;
};

char digit_of(int64_t rank) { return static_cast<char>(rank < 10 ? '0' + rank : 'a' + rank - 10); }

// One character per position: the rank that holds it, '.' for nobody.
void print_picture(const char* name, const ShardMap& map) {
  if (map.seq_len() > kWidestPicture || map.seq_len() == 0 || map.world() > kMostDigits) return;
  for (int64_t batch = 0; batch < map.num_lists(); ++batch) {
    std::cout << name;
    for (int64_t position = 0; position < map.seq_len(); ++position) {
      const std::optional<ShardMap::Place> place = map.place_of(position, batch);
      std::cout << (place ? digit_of(place->rank) : '.');
    }
    std::cout << "\n";
  }
}

std::string owner_of(const Step& step, const Operand& operand) {
  if (!step.computes) return "-";
  return operand.owner == kSeveral ? "several" : std::to_string(operand.owner);
}

// Returns the pairs of all steps.
int64_t print_pass(const RankPlan& part, const char* name, const std::vector<Step>& steps) {
  int64_t total = 0;
  for (const Step& step : steps) {
    int64_t pairs = 0;
    for (const Tile& tile : step.tiles) pairs += count_pairs(tile);
    total += pairs;
    const bool is_first = step.step == 0;
    std::cout << std::setw(4) << (is_first ? std::to_string(part.rank) : "") << "  " << std::left << std::setw(9)
              << (is_first ? name : "") << std::right << std::setw(4) << step.step << std::setw(9)
              << owner_of(step, step.q) << std::setw(9) << owner_of(step, step.kv) << std::setw(8) << step.tiles.size()
              << std::setw(16) << pairs << std::setw(16) << sent_bytes(step, part) << "\n";
  }
  return total;
}

void print_plan(const Plan& plan, const PlanOptions& options) {
  std::cout << name_of(plan.schedule()) << " over " << plan.world() << (plan.world() == 1 ? " rank: " : " ranks: ")
            << plan.problem().str() << "\nmask " << options.question.mask_text() << ", shard "
            << options.question.shard_text() << "\n\n";
  if (plan.q_map() == plan.kv_map()) {
    print_picture("held by  ", plan.q_map());
  } else {
    print_picture("queries  ", plan.q_map());
    print_picture("K/V      ", plan.kv_map());
  }
  std::cout << "\nrank  pass     step     q of    kv of   tiles           pairs       sends, B\n";
  int64_t forward = 0, backward = 0, total = 0, most = 0;
  for (int64_t rank = 0; rank < plan.world(); ++rank) {
    const RankPlan part = plan.rank(rank);
    const int64_t pairs = print_pass(part, "forward", part.forward) * part.num_q_heads();
    print_pass(part, "backward", part.backward);
    const SentBytes sent = sent_bytes(part);
    total += pairs;
    most = std::max(most, pairs);
    forward = std::max(forward, sent.forward);
    backward = std::max(backward, sent.backward);
  }
  std::cout << "\npairs of all batch entries and heads, forward: " << total;
  if (total > 0) {
    const double mean = static_cast<double>(total) / static_cast<double>(plan.world());
    std::cout << "; the busiest rank has " << static_cast<double>(most) / mean << " times the mean";
  }
  std::cout << "\nbytes that a rank sends at most: " << forward << " forward, " << backward << " backward\n";
}

void run(const PlanOptions& options) {
  const Plan plan = options.question.question().plan();
  if (options.as_json) {
    std::cout << (options.rank ? to_json(plan.rank(*options.rank)) : plan.to_json()) << "\n";
  } else if (options.rank) {
    std::cout << plan.rank(*options.rank).str();
  } else {
    print_plan(plan, options);
  }
}

}  // namespace

void add_plan(CLI::App& app, int&) {
  CLI::App* verb = app.add_subcommand("plan", "What every rank computes and sends");
  const auto options = std::make_shared<PlanOptions>();
  options->question.add_to(*verb);
  verb->add_option("--rank", options->rank, "Only this rank, step by step");
  verb->add_flag("--json", options->as_json, "Print JSON");
  verb->callback([options] { run(*options); });
}

}  // namespace ringspan::cli
