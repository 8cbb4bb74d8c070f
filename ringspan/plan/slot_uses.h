// SlotUses: when a plan is done with what lies in a slot, so that its memory can be given back.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "ringspan/plan/plan.h"

namespace ringspan {

class SlotUses {
 public:
  // Of the slots of `part.rank` in one pass.
  SlotUses(const RankPlan& part, const std::vector<Step>& steps);

  // Whether nothing reads, sends or adds to what lies there from step `step` on, before other content replaces it.
  bool is_done(Payload payload, int64_t slot, int64_t step) const;

 private:
  struct Event {
    int64_t step = 0;
    bool replaces = false;
  };
  std::map<std::pair<Payload, int64_t>, std::vector<Event>> events_;  // in the order in which they happen
};

}  // namespace ringspan
