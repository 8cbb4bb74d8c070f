#include "ringspan/plan/plan.h"

#include <iomanip>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "ringspan/sim/picture.h"

#include "cli/options.h"
#include "cli/progress.h"
#include "cli/python_verbs.h"
#include "cli/summary.h"
#include "cli/verbs.h"

namespace ringspan::cli {
namespace {

constexpr int64_t kWidestPicture = 64;
constexpr int64_t kMostDigits = 36;

struct PlanOptions {
  QuestionOptions question;
  std::optional<int64_t> rank;
  std::string plot;
  bool as_json = false, all_ranks = false;
};

char digit_of(int64_t rank) { return static_cast<char>(rank < 10 ? '0' + rank : 'a' + rank - 10); }

// One character per position: the rank that holds it, '.' for nobody.
void print_picture(const char* name, const ShardMap& map) {
  if (map.seq_len() > kWidestPicture || map.seq_len() == 0 || map.world() > kMostDigits) return;
  for (int64_t batch = 0; batch < map.num_lists(); ++batch) {
    std::cout << name;
    for (int64_t position = 0; position < map.seq_len(); ++position) {
      const std::optional<ShardMap::RankRow> place = map.place_of(position, batch);
      std::cout << (place ? digit_of(place->rank) : '.');
    }
    std::cout << "\n";
  }
}

std::string owner_of(const Step& step, const Operand& operand) {
  if (!step.computes) return "-";
  return operand.owner == kSeveral ? "several" : std::to_string(operand.owner);
}

int64_t pairs_of(const std::vector<Step>& steps) {
  int64_t pairs = 0;
  for (const Step& step : steps) pairs += kept_pairs(step);
  return pairs;
}

void print_steps(const RankPlan& part, const char* name, const std::vector<Step>& steps) {
  for (const Step& step : steps) {
    const bool is_first = step.step == 0;
    std::cout << std::setw(4) << (is_first ? std::to_string(part.rank) : "") << "  " << std::left << std::setw(9)
              << (is_first ? name : "") << std::right << std::setw(4) << step.step << std::setw(9)
              << owner_of(step, step.q) << std::setw(9) << owner_of(step, step.kv) << std::setw(8) << step.tiles.size()
              << std::setw(16) << kept_pairs(step) << std::setw(16) << sent_bytes(step, part) << "\n";
  }
}

void print_pass(const RankPlan& part, const char* name, const std::vector<Step>& steps, const std::string& why) {
  int64_t tiles = 0, sent = 0;
  for (const Step& step : steps) {
    tiles += std::ssize(step.tiles);
    sent += sent_bytes(step, part);
  }
  std::cout << std::setw(7) << part.rank << "  " << std::left << std::setw(9) << name << std::right << std::setw(7)
            << steps.size() << std::setw(9) << tiles << std::setw(20) << pairs_of(steps) << std::setw(20) << sent
            << "  " << why << "\n";
}

// The measures of all ranks; pairs are of all batch entries and the heads that a rank computes.
struct Measures {
  Measure pairs{"pairs of its heads"}, forward{"bytes sent forward"}, backward{"bytes sent backward"};

  void add(const RankPlan& part) {
    pairs.add(pairs_of(part.forward) * part.num_q_heads());
    const SentBytes sent = sent_bytes(part);
    forward.add(sent.forward);
    backward.add(sent.backward);
  }
};

void print_every_rank(const Plan& plan) {
  std::cout << "\nrank  pass     step     q of    kv of   tiles           pairs       sends, B\n";
  Measures measures;
  for (int64_t rank = 0; rank < plan.world(); ++rank) {
    const RankPlan part = plan.rank(rank);
    print_steps(part, "forward", part.forward);
    print_steps(part, "backward", part.backward);
    measures.add(part);
  }
  std::cout << "\npairs of all batch entries and heads, forward: " << std::fixed << std::setprecision(0)
            << measures.pairs.total() << std::defaultfloat << std::setprecision(6);
  if (measures.pairs.total() > 0) {
    std::cout << "; the busiest rank has " << static_cast<double>(measures.pairs.most()) / measures.pairs.mean()
              << " times the mean";
  }
  std::cout << "\nbytes that a rank sends at most: " << measures.forward.most() << " forward, "
            << measures.backward.most() << " backward\n";
}

void print_summary(const Plan& plan) {
  Measures all;
  {
    Progress progress;
    for (int64_t rank = 0; rank < plan.world(); ++rank) {
      progress.count("rank", rank, plan.world());
      all.add(plan.rank(rank));
    }
  }
  const std::vector<Measure> measures = {all.pairs, all.forward, all.backward};
  std::cout << "\n   rank  pass       steps    tiles               pairs            sends, B\n";
  for (const Pick& pick : picks_of(plan.world(), measures)) {
    const RankPlan part = plan.rank(pick.rank);
    print_pass(part, "forward", part.forward, pick.why);
    print_pass(part, "backward", part.backward, "");
  }
  std::cout << "\n" << summary_of(plan.world(), measures);
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
  plan.world() > kMostRanks && !options.all_ranks ? print_summary(plan) : print_every_rank(plan);
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
  if (!options.plot.empty()) draw_picture(picture_json(plan, options.question.note()), options.plot);
}

}  // namespace

void add_plan(CLI::App& app, int&) {
  CLI::App* verb = app.add_subcommand("plan", "What every rank computes and sends");
  const auto options = std::make_shared<PlanOptions>();
  options->question.add_to(*verb);
  CLI::Option* rank = verb->add_option("--rank", options->rank, "Only this rank, step by step");
  verb->add_flag("--all-ranks", options->all_ranks, "Every rank, also of more than 64")->excludes(rank);
  verb->add_option("--plot", options->plot, "Draw the mask, who holds what, and the work of each rank (FILE.png)");
  verb->add_flag("--json", options->as_json, "Print JSON");
  verb->callback([options] { run(*options); });
}

}  // namespace ringspan::cli
