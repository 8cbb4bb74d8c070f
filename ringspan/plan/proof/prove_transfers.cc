#include <algorithm>
#include <array>
#include <utility>

#include "ringspan/plan/proof/proof.h"

namespace ringspan::detail {
namespace {

class TransferCheck {
 public:
  TransferCheck(const RankPlan& part, Pass pass, const Step& step, const Transfer& transfer, Faults& faults)
      : part_(part), pass_(pass), step_(step), transfer_(transfer), faults_(faults) {}

  void run(bool is_before) {
    const auto is_rank = [&](int64_t rank) { return 0 <= rank && rank < part_.world; };
    if (!is_rank(transfer_.src) || !is_rank(transfer_.dst)) {
      complain("is not between two of ", part_.world, " ranks");
      return;
    }
    if (transfer_.src != part_.rank && transfer_.dst != part_.rank) complain("does not concern rank ", part_.rank);
    if (transfer_.step != step_.step) complain("names step ", transfer_.step);
    const int64_t num_steps = static_cast<int64_t>(steps_of(part_, pass_).size());
    if (transfer_.needed_by <= step_.step || transfer_.needed_by > num_steps) {
      complain("is needed by step ", transfer_.needed_by, " of ", num_steps, ", posted in ", step_.step);
    }
    if (!is_rank(transfer_.owner) && transfer_.owner != kSeveral) {
      complain("has owner ", transfer_.owner);
      return;
    }
    if (is_before && is_gradient(transfer_.payload)) complain("is a gradient, posted before the tiles");
    if (transfer_.adds && !is_gradient(transfer_.payload)) complain("adds, and is no gradient");
    check_ranges();
    check_place("from", transfer_.from);
    check_place("to", transfer_.to);
    const bool writes_inputs = transfer_.to.slot == kOwnSlot && is_input(transfer_.payload);
    if (writes_inputs) complain("arrives in the caller's tensor");
  }

 private:
  static bool is_input(Payload payload) {
    for (const Payload result : {Payload::kOut, Payload::kMax, Payload::kSum, Payload::kLse}) {
      if (payload == result) return false;
    }
    return !is_gradient(payload);
  }

  template <class... Parts>
  void complain(const Parts&... why) {
    faults_.add(where(part_, pass_, step_.step), ": ", name_of(transfer_.payload), " from rank ", transfer_.src, " to ",
                transfer_.dst, " ", why...);
  }

  void check_ranges() {
    const PayloadSize size = size_of(transfer_.payload, part_.problem);
    const auto lies_in = [](int64_t begin, int64_t end, int64_t count) {
      return 0 <= begin && begin <= end && end <= count;
    };
    if (!lies_in(transfer_.batch_begin, transfer_.batch_end, size.batch)) {
      complain("has batch entries ", transfer_.batch_begin, "..", transfer_.batch_end, " of ", size.batch);
    }
    if (!lies_in(transfer_.head_begin, transfer_.head_end, size.heads)) {
      complain("has heads ", transfer_.head_begin, "..", transfer_.head_end, " of ", size.heads);
    }
    int64_t next = 0;
    const int64_t count =
        transfer_.owner == kSeveral ? transfer_.from.rows : part_.local_rows(transfer_.payload, transfer_.owner);
    for (const RowRange& range : transfer_.rows) {
      if (range.begin < next || !lies_in(range.begin, range.end, count)) {
        complain("has rows ", range.begin, "..", range.end, " of ", count);
      }
      next = range.end;
    }
  }

  void check_place(const char* end, const BufferPlace& place) {
    if (place.slot < 0 || place.slot >= kNumSlots) {
      complain("goes ", end, " slot ", place.slot, " of ", kNumSlots);
      return;
    }
    if (place.slot == kOwnSlot) {
      const int64_t holder = end[0] == 'f' ? transfer_.src : transfer_.dst;
      if (transfer_.owner != holder) complain("goes ", end, " the tensor of rank ", holder, ", which is not its owner");
      if (place != BufferPlace{}) complain("names rows of a buffer in the caller's tensor");
      return;
    }
    const int64_t rows = transfer_.num_rows();
    const int64_t last = rows == 0 ? place.row : place.row + (rows - 1) * place.stride;
    if (place.row < 0 || place.stride < 1 || (rows > 0 && last >= place.rows)) {
      complain("goes ", end, " rows ", place.row, "..", last, " of ", place.rows);
    }
    if (transfer_.head_begin < transfer_.head_end &&
        (transfer_.head_begin < place.head_begin || transfer_.head_end > place.head_end)) {
      complain("goes ", end, " heads ", place.head_begin, "..", place.head_end, " and has ", transfer_.head_begin, "..",
               transfer_.head_end);
    }
  }

  const RankPlan& part_;
  Pass pass_;
  const Step& step_;
  const Transfer& transfer_;
  Faults& faults_;
};

// What a collective over the group would have to know: the kinds of tensors and until when they may travel.
using Posts = std::set<std::pair<bool, int64_t>>;

Posts posts_of(const std::vector<Transfer>& transfers) {
  Posts posts;
  for (const Transfer& transfer : transfers) {
    if (transfer.is_sent()) posts.insert({is_gradient(transfer.payload), transfer.needed_by});
  }
  return posts;
}

void prove_same_posts(std::span<const RankPlan> parts, Pass pass, Faults& faults) {
  const std::vector<Step>& model = steps_of(parts[0], pass);
  for (const RankPlan& part : parts) {
    const std::vector<Step>& steps = steps_of(part, pass);
    if (steps.size() != model.size()) {
      faults.add(where(part, pass, 0), ": has ", steps.size(), " steps, rank 0 has ", model.size());
      continue;
    }
    for (size_t s = 0; s < steps.size(); ++s) {
      if (steps[s].step != static_cast<int64_t>(s)) faults.add(where(part, pass, steps[s].step), ": comes as step ", s);
      if (posts_of(steps[s].before) != posts_of(model[s].before) ||
          posts_of(steps[s].after) != posts_of(model[s].after)) {
        faults.add(where(part, pass, steps[s].step), ": posts other kinds of messages than rank 0");
      }
    }
  }
}

void prove_meetings(std::span<const RankPlan> parts, Pass pass, Faults& faults) {
  std::map<std::pair<bool, Transfer>, int64_t> balance;  // listed by the source minus listed by the destination
  for (const RankPlan& part : parts) {
    for (const Step& step : steps_of(part, pass)) {
      for (const bool is_before : {true, false}) {
        for (const Transfer& t : is_before ? step.before : step.after) {
          const auto entry = balance.try_emplace({is_before, t}, 0).first;
          entry->second += (t.src == part.rank ? 1 : 0) - (t.dst == part.rank ? 1 : 0);
          if (entry->second == 0) balance.erase(entry);
        }
      }
    }
  }
  for (const auto& [key, count] : balance) {
    const auto& [is_before, t] = key;
    faults.add(pass == Pass::kForward ? "forward" : "backward", " step ", t.step,
               is_before ? " (before): " : " (after): ", name_of(t.payload), " of rank ", t.owner, " from rank ", t.src,
               " slot ", t.from.slot, " to rank ", t.dst, " slot ", t.to.slot, " is listed alike by its ",
               count > 0 ? "source" : "destination", " only");
  }
}

}  // namespace

void prove_transfers(std::span<const RankPlan> parts, Pass pass, Faults& faults) {
  for (const RankPlan& part : parts) {
    for (const Step& step : steps_of(part, pass)) {
      for (const Transfer& transfer : step.before) TransferCheck(part, pass, step, transfer, faults).run(true);
      for (const Transfer& transfer : step.after) TransferCheck(part, pass, step, transfer, faults).run(false);
    }
  }
  prove_meetings(parts, pass, faults);
  prove_same_posts(parts, pass, faults);
}

}  // namespace ringspan::detail
