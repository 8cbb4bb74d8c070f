// Plans for people: one line per step.
#include <iomanip>
#include <sstream>

#include "ringspan/plan/plan.h"

namespace ringspan {
namespace {

int64_t count_pairs_of(const Step& step) {
  int64_t pairs = 0;
  for (const Tile& tile : step.tiles) pairs += count_pairs(tile);
  return pairs;
}

// "k+v of 3 [0]->2[1], 512 bytes": what `rank` sends in a step.
std::string describe_sends(const std::vector<Transfer>& transfers, const RankPlan& part) {
  std::ostringstream names, text;
  int64_t bytes = 0;
  const Transfer* last = nullptr;
  for (const Transfer& transfer : transfers) {
    if (transfer.src != part.rank) continue;
    names << (last == nullptr ? "" : "+") << name_of(transfer.payload);
    bytes += bytes_of(transfer, part.problem);
    last = &transfer;
  }
  if (last == nullptr) return "";
  text << names.str() << " of " << last->owner << " [" << last->src_slot << "] -> rank " << last->dst << " ["
       << last->dst_slot << "], " << bytes << " bytes";
  return text.str();
}

void write_steps(std::ostringstream& text, const char* name, const std::vector<Step>& steps, const RankPlan& part,
                 bool has_gradients) {
  text << "  " << name << "\n";
  for (const Step& step : steps) {
    text << "    step " << step.step << "  kv of " << step.kv_owner << " [" << step.kv_slot << "]";
    if (has_gradients) text << "  grad " << (step.grad_begins ? "begins" : "adds  ") << " [" << step.grad_slot << "]";
    text << "  tiles " << std::setw(4) << step.tiles.size() << "  pairs " << std::setw(10) << count_pairs_of(step);
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
