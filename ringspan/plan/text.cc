// Plans for people: one line per step.
#include <iomanip>
#include <sstream>

#include "ringspan/base/error.h"
#include "ringspan/plan/plan.h"

namespace ringspan {
namespace {

// "3[1]" or "several[1]": whose rows, in which slot.
std::string describe(const Operand& operand) {
  std::ostringstream text;
  if (operand.owner == kSeveral) {
    text << "several";
  } else {
    text << operand.owner;
  }
  text << '[' << operand.slot << ']';
  return text.str();
}

// "k+v of 3 [0] -> rank 2 [1], 512 bytes; ...": what `rank` sends in a step, by destination.
std::string describe_sends(const std::vector<Transfer>& transfers, const RankPlan& part) {
  struct Sending {
    const Transfer* first;
    std::string names;
    int64_t bytes = 0;
  };
  std::vector<Sending> sendings;
  for (const Transfer& transfer : transfers) {
    if (transfer.src != part.rank || !transfer.is_sent()) continue;
    if (sendings.empty() || sendings.back().first->dst != transfer.dst) sendings.push_back({&transfer, ""});
    Sending& sending = sendings.back();
    sending.names += concat(sending.names.empty() ? "" : "+", name_of(transfer.payload));
    sending.bytes += bytes_of(transfer, part.problem);
  }
  std::ostringstream text;
  for (const Sending& sending : sendings) {
    const Transfer& first = *sending.first;
    text << (&sending == &sendings.front() ? "" : "; ") << sending.names << " of "
         << (first.owner == kSeveral ? std::string("several") : std::to_string(first.owner)) << " [" << first.from.slot
         << "] -> rank " << first.dst << " [" << first.to.slot << "], " << sending.bytes << " bytes";
  }
  return text.str();
}

void write_steps(std::ostringstream& text, const char* name, const std::vector<Step>& steps, const RankPlan& part,
                 bool has_gradients) {
  const auto gradient = [](const GradientPlace& place) {
    return place.is_computed() ? concat(place.begins ? "begins" : "adds  ", " [", place.slot, "]") : "left out  ";
  };
  text << "  " << name << "\n";
  for (const Step& step : steps) {
    text << "    step " << step.step;
    if (step.computes) {
      text << "  q of " << describe(step.q) << "  kv of " << describe(step.kv);
      if (has_gradients) text << "  dq " << gradient(step.dq) << "  dkv " << gradient(step.dkv);
      text << "  tiles " << std::setw(4) << step.tiles.size() << "  pairs " << std::setw(10) << kept_pairs(step);
    } else {
      text << "  computes nothing";
    }
    const std::string before = describe_sends(step.before, part), after = describe_sends(step.after, part);
    if (!before.empty()) text << "  | before: " << before;
    if (!after.empty()) text << "  | after: " << after;
    text << "\n";
  }
}

}  // namespace

std::string RankPlan::str() const {
  std::ostringstream text;
  text << "rank " << rank << " of " << world << ", " << name_of(schedule) << ", " << q_rows[rank] << " query rows, "
       << kv_rows[rank] << " K/V rows\n";
  write_steps(text, "forward", forward, *this, false);
  write_steps(text, "backward", backward, *this, true);
  const SentBytes sent = sent_bytes(*this);
  text << "  sends " << sent.forward << " bytes forward, " << sent.backward << " backward\n";
  return text.str();
}

std::string Plan::str() const {
  std::ostringstream text;
  text << name_of(schedule_) << " over " << world() << (world() == 1 ? " rank: " : " ranks: ") << problem_.str()
       << "\n";
  text << "query rows: " << q_map_.str();
  if (kv_map_ != q_map_) text << "K/V rows: " << kv_map_.str();
  for (int64_t r = 0; r < world(); ++r) text << rank(r).str();
  return text.str();
}

}  // namespace ringspan
