#include "ringspan/plan/slot_uses.h"

#include <algorithm>

#include "ringspan/plan/exchange.h"

namespace ringspan {

SlotUses::SlotUses(const RankPlan& part, const std::vector<Step>& steps) {
  const auto note = [&](Payload payload, int64_t slot, int64_t step, bool replaces) {
    if (slot != kOwnSlot && slot != kNoSlot) events_[{payload, slot}].push_back({step, replaces});
  };
  const auto note_list = [&](const std::vector<Transfer>& transfers) {
    for (const Transfer& t : transfers) {
      if (t.src == part.rank) note(t.payload, t.from.slot, t.step, false);
    }
    for (const Transfer& t : transfers) {
      if (t.dst != part.rank) continue;
      const bool replaces = replaces_slot(t, part.problem);
      note(t.payload, t.to.slot, t.step, replaces);
      if (!replaces) note(t.payload, t.to.slot, t.needed_by, false);
    }
  };
  for (const Step& step : steps) {
    note_list(step.before);
    if (step.computes) {
      for (int64_t index = 0; index < kNumPayloads; ++index) {
        const auto payload = static_cast<Payload>(index);
        const bool of_kv = is_of_kv(payload);
        const int64_t slot = is_gradient(payload) ? (of_kv ? step.dkv : step.dq).slot : (of_kv ? step.kv : step.q).slot;
        note(payload, slot, step.step, false);
      }
    }
    note_list(step.after);
  }
  // What arrives late counts when it arrives.
  for (auto& [slot, events] : events_) {
    std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.step < b.step; });
  }
}

bool SlotUses::is_done(Payload payload, int64_t slot, int64_t step) const {
  const auto found = events_.find({payload, slot});
  if (found == events_.end()) return true;
  const auto next = std::partition_point(found->second.begin(), found->second.end(),
                                         [&](const Event& event) { return event.step < step; });
  return next == found->second.end() || next->replaces;
}

}  // namespace ringspan
