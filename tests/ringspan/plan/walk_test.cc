// The walk's order, and that it and the prover, who keeps an order of its own, agree on what arrives in time.
#include "ringspan/plan/walk.h"

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"
#include "ringspan/plan/validate.h"

#include "tests/ringspan/plan/plan_cases.h"

namespace ringspan {
namespace {

TEST(Walk, GoesThroughTheActsOfEachStepAndEndsWithBothWaits) {
  std::vector<std::string> acts;
  for (Walk at(2); !at.is_done(); at.next()) {
    acts.push_back(concat(at.step(), "wbcga"[static_cast<int>(at.act())]));
  }
  EXPECT_EQ(acts, (std::vector<std::string>{"0w", "0b", "0c", "0g", "0a", "1w", "1b", "1c", "1g", "1a", "2w", "2g"}));
}

TEST(Walk, ComputesOnlyInStepsThatDo) {
  struct {
    std::string seen;
    void wait(int64_t step, bool gradients) { seen += concat(gradients ? "g" : "w", step, " "); }
    void post(std::span<const Transfer> transfers) { seen += concat("p", transfers.size(), " "); }
    void compute(const Step& step) { seen += concat("c", step.step, " "); }
  } visitor;
  const std::vector<Step> steps = {{.step = 0, .computes = false, .before = std::vector<Transfer>(2)},
                                   {.step = 1, .after = std::vector<Transfer>(3)}};
  walk(steps, visitor);
  EXPECT_EQ(visitor.seen, "w0 p2 g0 p0 w1 p0 c1 g1 p3 w2 g2 ");
}

// Walks over one rank's pass and notes what is used before it has arrived.
class Watcher {
 public:
  explicit Watcher(const RankPlan& part) : part_(part) {}

  void wait(int64_t step, bool gradients) {
    std::erase_if(flights_,
                  [&](const Transfer* t) { return t->needed_by <= step && is_gradient(t->payload) == gradients; });
  }
  void post(std::span<const Transfer> transfers) {
    for (const Transfer& t : transfers) {
      if (t.src == part_.rank && is_gradient(t.payload)) use(t.payload, t.from.slot, t.step);
    }
    for (const Transfer& t : transfers) {
      if (t.dst == part_.rank && t.num_elements(1) > 0) flights_.push_back(&t);
    }
  }
  void compute(const Step& step) {
    for (int64_t index = 0; index < kNumPayloads; ++index) {
      const auto payload = static_cast<Payload>(index);
      if (!is_gradient(payload)) {
        use(payload, (is_of_kv(payload) ? step.kv : step.q).slot, -1);
      } else {
        // Those that the step needs are waited for while it computes.
        use(payload, (is_of_kv(payload) ? step.dkv : step.dq).slot, step.step);
      }
    }
  }
  bool is_late() const { return is_late_ || !flights_.empty(); }

 private:
  void use(Payload payload, int64_t slot, int64_t waited_for) {
    is_late_ = is_late_ || std::any_of(flights_.begin(), flights_.end(), [&](const Transfer* t) {
                 return t->payload == payload && t->to.slot == slot && slot != kOwnSlot && t->needed_by > waited_for;
               });
  }

  const RankPlan& part_;
  std::vector<const Transfer*> flights_;
  bool is_late_ = false;
};

bool is_late(const RankPlan& part, const std::vector<Step>& steps) {
  Watcher watcher(part);
  walk(steps, watcher);
  return watcher.is_late();
}

// Puts one transfer off by a step, at both of its ends.
void put_off(std::vector<RankPlan>& parts, bool forward, const Transfer& late) {
  for (RankPlan& part : parts) {
    for (Step& step : forward ? part.forward : part.backward) {
      for (auto* transfers : {&step.before, &step.after}) {
        for (Transfer& t : *transfers) {
          if (t == late) ++t.needed_by;
        }
      }
    }
  }
}

TEST(Walk, AgreesWithTheProverOnWhatArrivesInTime) {
  int num_late = 0;
  for (const Schedule& schedule : schedules_for(4)) {
    SCOPED_TRACE(name_of(schedule));
    const MaskSpec mask = testing::causal(16);
    const ShardMap map = ShardMap::head_tail(16, 4);
    const Plan plan = build_plan(testing::problem_of(16, 16), mask, map, schedule);
    std::vector<RankPlan> parts;
    for (int64_t rank = 0; rank < plan.world(); ++rank) parts.push_back(plan.rank(rank));
    ASSERT_TRUE(validate(plan, parts, mask).empty());
    const RankPlan& part = parts[1];
    for (const bool forward : {true, false}) {
      const std::vector<Step>& steps = forward ? part.forward : part.backward;
      EXPECT_FALSE(is_late(part, steps));
      for (const Step& step : steps) {
        for (const auto* transfers : {&step.before, &step.after}) {
          for (const Transfer& t : *transfers) {
            if (t.dst != part.rank || t.num_elements(1) == 0) continue;
            std::vector<RankPlan> changed = parts;
            put_off(changed, forward, t);
            if (!is_late(changed[1], forward ? changed[1].forward : changed[1].backward)) continue;
            ++num_late;
            EXPECT_FALSE(validate(plan, changed, mask).empty()) << "step " << t.step << " " << name_of(t.payload);
          }
        }
      }
    }
  }
  EXPECT_GT(num_late, 50);
}

}  // namespace
}  // namespace ringspan
