// validate() accepts every plan that is built, and finds every single fault put into one.
#include "ringspan/plan/validate.h"

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <type_traits>

#include <gtest/gtest.h>

#include "tests/ringspan/plan/plan_cases.h"
#include "tests/ringspan/support/sanitized.h"

namespace ringspan {
namespace {

using testing::causal;
using testing::problem_of;

std::string joined(const std::vector<std::string>& faults) {
  std::string text;
  for (const std::string& fault : faults) text += fault + "\n";
  return text;
}

// What is empty moves nothing.
bool is_empty(const Transfer& t) { return t.num_elements(1) == 0; }

struct Built {
  Schedule schedule;
  GradRoute route;
};

// A bias and a mask by rows, so that schedules that move queries move these too.
Problem question() {
  Problem problem = problem_of(16, 16, 2);
  problem.bias = {.batch = 1, .heads = 1, .element_bytes = 4, .wants_gradient = true};
  problem.mask = {.batch = 2, .heads = 4, .element_bytes = 1};
  return problem;
}

class ValidateMutation : public ::testing::TestWithParam<Built> {
 protected:
  ValidateMutation()
      : plan_(build_plan(question(), documents_by_lengths(16, {{3, 5, 8}, {16}}, {}), ShardMap::head_tail(16, 4),
                         ShardMap::head_tail(16, 4), GetParam().schedule, GetParam().route)) {
    for (int64_t rank = 0; rank < plan_.world(); ++rank) parts_.push_back(plan_.rank(rank));
  }

  // The faults after `spoil` has changed the parts.
  std::vector<std::string> faults(const std::function<void(std::vector<RankPlan>&)>& spoil) const {
    std::vector<RankPlan> parts = parts_;
    spoil(parts);
    return validate(plan_, parts, plan_.mask());
  }

  // Each single change of a number in the two lists of steps of `Item` must be found.
  template <class Item>
  void expect_all_found(const std::function<std::vector<Item>*(Step&, int)>& list_of,
                        const std::vector<std::pair<const char*, std::function<void(Item&)>>>& changes) const {
    int num_changes = 0;
    std::vector<RankPlan> parts = parts_;
    for (int64_t rank : {0, 3}) {
      for (bool forward : {true, false}) {
        std::vector<Step>& steps = forward ? parts[rank].forward : parts[rank].backward;
        for (size_t s = 0; s < steps.size(); ++s) {
          for (int which : {0, 1}) {
            std::vector<Item>* list = list_of(steps[s], which);
            for (size_t k = 0; list != nullptr && k < list->size(); ++k) {
              if (is_idle<Item>(parts_[rank], forward, s, which, k)) continue;
              for (const auto& [name, change] : changes) {
                const Item before = (*list)[k];
                change((*list)[k]);
                if (before == (*list)[k]) continue;
                if (test::runs_case(num_changes++, 11)) {
                  ASSERT_FALSE(validate(plan_, parts, plan_.mask()).empty())
                      << name << ": rank " << rank << " step " << s << " item " << k;
                }
                (*list)[k] = before;
              }
            }
          }
        }
      }
    }
    EXPECT_GT(num_changes, 50);
  }

  // A copy of nothing from slot to slot: whatever it says, nothing happens.
  template <class Item>
  static bool is_idle(const RankPlan& part, bool forward, size_t s, int which, size_t k) {
    if constexpr (std::is_same_v<Item, Transfer>) {
      const Step& step = (forward ? part.forward : part.backward)[s];
      const Transfer& transfer = (which == 0 ? step.before : step.after)[k];
      return !transfer.is_sent() && is_empty(transfer);
    }
    return false;
  }

  Plan plan_;
  std::vector<RankPlan> parts_;
};

TEST_P(ValidateMutation, TheUnchangedPlanIsProven) {
  EXPECT_EQ(joined(faults([](std::vector<RankPlan>&) {})), "");
  EXPECT_EQ(joined(validate(plan_, plan_.mask())), "");
}

TEST_P(ValidateMutation, EveryChangeOfATileIsFound) {
  expect_all_found<Tile>([](Step& step, int which) { return which == 0 ? &step.tiles : nullptr; },
                         {{"batch", [](Tile& t) { t.batch = 1 - t.batch; }},
                          {"batch out of range", [](Tile& t) { t.batch = 2; }},
                          {"query row", [](Tile& t) { ++t.q_row0; }},
                          {"query position", [](Tile& t) { ++t.q_pos0; }},
                          {"query row and position", [](Tile& t) { ++t.q_row0, ++t.q_pos0; }},
                          {"one query row less", [](Tile& t) { --t.q_rows; }},
                          {"one query row more", [](Tile& t) { ++t.q_rows, t.lo = -kNoDiagonal; }},
                          {"K/V row", [](Tile& t) { --t.kv_row0; }},
                          {"K/V position", [](Tile& t) { --t.kv_pos0; }},
                          {"one K/V row less", [](Tile& t) { --t.kv_rows; }},
                          {"one K/V row more", [](Tile& t) { ++t.kv_rows, t.hi = kNoDiagonal; }},
                          {"hi off by one", [](Tile& t) { --t.hi; }},
                          {"lo off by one", [](Tile& t) { ++t.lo; }}});
}

TEST_P(ValidateMutation, EveryChangeOfATransferIsFound) {
  expect_all_found<Transfer>(
      [](Step& step, int which) { return which == 0 ? &step.before : &step.after; },
      {{"step", [](Transfer& t) { ++t.step; }},
       {"source", [](Transfer& t) { t.src = (t.src + 1) % 4; }},
       {"destination", [](Transfer& t) { t.dst = (t.dst + 1) % 4; }},
       {"destination out of range", [](Transfer& t) { t.dst = 4; }},
       {"payload", [](Transfer& t) { t.payload = Payload::kQ; }},
       {"owner", [](Transfer& t) { t.owner = (t.owner + 1) % 4; }},
       {"owner out of range", [](Transfer& t) { t.owner = -2; }},
       {"owner several", [](Transfer& t) { t.owner = kSeveral; }},
       {"needed later", [](Transfer& t) { ++t.needed_by; }},
       {"needed at once", [](Transfer& t) { t.needed_by = t.step; }},
       // The caller's bias gradient is zero, so that it is all one there.
       {"adds",
        [](Transfer& t) {
          const bool matters = !is_empty(t) && t.payload != Payload::kDbias;
          t.adds = t.adds != (t.is_sent() || matters);
        }},
       {"batch", [](Transfer& t) { --t.batch_end; }},
       {"heads", [](Transfer& t) { ++t.head_begin; }},
       {"rows", [](Transfer& t) { t.rows.empty() ? t.rows.push_back({0, 1}) : void(--t.rows[0].end); }},
       {"no rows", [](Transfer& t) { t.rows.clear(); }},
       {"source slot", [](Transfer& t) { ++t.from.slot; }},
       {"destination slot", [](Transfer& t) { ++t.to.slot; }},
       {"destination row", [](Transfer& t) { ++t.to.row; }},
       {"source row", [](Transfer& t) { ++t.from.row; }},
       {"destination rows", [](Transfer& t) { ++t.to.rows; }},
       {"destination heads", [](Transfer& t) { ++t.to.head_end; }}});
}

// The same change on both sides leaves the messages matched; what slots hold must show it.
TEST_P(ValidateMutation, ChangesOfWholeHopsAreFound) {
  const std::pair<const char*, std::function<void(Transfer&)>> changes[] = {
      {"source slot", [](Transfer& t) { t.from.slot = 7; }},
      {"destination slot", [](Transfer& t) { t.to.slot = 7; }},
      {"into the slot that is sent", [](Transfer& t) { t.to = t.from; }},
      {"owner", [](Transfer& t) { t.owner = (t.owner + 1) % 4; }},
      {"the other way round", [](Transfer& t) { t.dst = (t.src + 4 - (t.dst - t.src)) % 4; }},
      {"rows", [](Transfer& t) { t.rows = {{0, 3}}; }},
      {"adds or not", [](Transfer& t) { t.adds = !t.adds; }}};
  for (const auto& [name, change] : changes) {
    for (bool forward : {true, false}) {
      const size_t num_steps = (forward ? parts_[0].forward : parts_[0].backward).size();
      for (size_t s = 0; s < num_steps; ++s) {
        for (bool before : {true, false}) {
          int num_changes = 0;
          const std::vector<std::string> result = faults([&](std::vector<RankPlan>& parts) {
            for (RankPlan& part : parts) {
              Step& step = (forward ? part.forward : part.backward)[s];
              for (Transfer& transfer : before ? step.before : step.after) {
                const Transfer unchanged = transfer;
                if (!is_empty(transfer)) change(transfer);
                num_changes += transfer != unchanged;
              }
            }
          });
          EXPECT_EQ(result.empty(), num_changes == 0) << name << " step " << s << (forward ? " forward" : " backward");
        }
      }
    }
  }
}

TEST_P(ValidateMutation, DroppedAndDoubledItemsAreFound) {
  for (bool doubled : {false, true}) {
    for (bool forward : {true, false}) {
      const size_t num_steps = (forward ? parts_[2].forward : parts_[2].backward).size();
      for (size_t s = 0; s < num_steps; ++s) {
        const auto edit = [&](auto& list) { doubled ? list.push_back(list.back()) : list.pop_back(); };
        for (int which : {0, 1, 2}) {
          bool changed = false;
          const std::vector<std::string> result = faults([&](std::vector<RankPlan>& parts) {
            Step& step = (forward ? parts[2].forward : parts[2].backward)[s];
            changed = which == 0 ? !step.tiles.empty() : !(which == 1 ? step.before : step.after).empty();
            if (!changed) return;
            if (which == 0) edit(step.tiles);
            if (which == 1) edit(step.before);
            if (which == 2) edit(step.after);
          });
          EXPECT_EQ(result.empty(), !changed) << doubled << " list " << which << " step " << s;
        }
      }
    }
  }
}

// One tensor's part of a step is left out, or listed twice, by all ranks alike.
TEST_P(ValidateMutation, WholeHopsLeftOutOrRepeatedAreFound) {
  for (int64_t index = 0; index < kNumPayloads; ++index) {
    const auto payload = static_cast<Payload>(index);
    for (bool forward : {true, false}) {
      const size_t num_steps = (forward ? parts_[0].forward : parts_[0].backward).size();
      for (size_t s = 0; s < num_steps; ++s) {
        for (bool repeated : {false, true}) {
          bool changed = false;
          const std::vector<std::string> result = faults([&](std::vector<RankPlan>& parts) {
            for (RankPlan& part : parts) {
              Step& step = (forward ? part.forward : part.backward)[s];
              for (std::vector<Transfer>* list : {&step.before, &step.after}) {
                std::vector<Transfer> edited;
                for (const Transfer& transfer : *list) {
                  const bool is_hit = transfer.payload == payload && !is_empty(transfer);
                  changed |= is_hit;
                  for (int copies = is_hit ? (repeated ? 2 : 0) : 1; copies > 0; --copies) edited.push_back(transfer);
                }
                *list = edited;
              }
            }
          });
          EXPECT_EQ(result.empty(), !changed)
              << name_of(payload) << " step " << s << (repeated ? " twice" : " missing");
        }
      }
    }
  }
}

TEST_P(ValidateMutation, EveryChangeOfAStepIsFound) {
  const std::pair<const char*, std::function<void(Step&)>> changes[] = {
      {"number", [](Step& step) { ++step.step; }},
      {"K/V owner", [](Step& step) { step.kv.owner = (step.kv.owner + 1) % 4; }},
      {"K/V owner out of range", [](Step& step) { step.kv.owner = 4; }},
      {"K/V slot", [](Step& step) { step.kv.slot = (step.kv.slot + 1) % 3; }},
      {"K/V rows", [](Step& step) { ++step.kv.rows; }},
      {"query owner", [](Step& step) { step.q.owner = (step.q.owner + 1) % 4; }},
      {"query slot", [](Step& step) { step.q.slot = (step.q.slot + 1) % 3; }},
      {"computes", [](Step& step) { step.computes = !step.computes; }}};
  const std::pair<const char*, std::function<void(Step&)>> gradient_changes[] = {
      {"dkv slot", [](Step& step) { step.dkv.slot = (step.dkv.slot + 1) % 3; }},
      {"dkv slot out of range", [](Step& step) { step.dkv.slot = kNumSlots; }},
      {"dkv begins", [](Step& step) { step.dkv.begins = !step.dkv.begins; }},
      {"dq slot", [](Step& step) { step.dq.slot = (step.dq.slot + 1) % 3; }},
      {"dq begins", [](Step& step) { step.dq.begins = !step.dq.begins; }}};
  const auto matters = [](const Step& step) { return step.computes && step.q.rows > 0 && step.kv.rows > 0; };
  for (bool forward : {true, false}) {
    const size_t num_steps = (forward ? parts_[0].forward : parts_[0].backward).size();
    for (size_t s = 0; s < num_steps; ++s) {
      const auto found = [&](const auto& change) {
        return !faults([&](auto& parts) { change((forward ? parts[1].forward : parts[1].backward)[s]); }).empty();
      };
      if (!matters((forward ? parts_[1].forward : parts_[1].backward)[s])) continue;
      for (const auto& [name, change] : changes) EXPECT_TRUE(found(change)) << name << " " << s << forward;
      if (forward) continue;
      for (const auto& [name, change] : gradient_changes) EXPECT_TRUE(found(change)) << name << " " << s;
    }
  }
}

TEST_P(ValidateMutation, ChangesOfThePartAreFound) {
  EXPECT_FALSE(faults([](auto& parts) { ++parts[1].heads[0].q_begin; }).empty());
  EXPECT_FALSE(faults([](auto& parts) { --parts[1].heads.back().kv_end; }).empty());
  EXPECT_FALSE(faults([](auto& parts) { parts[1].heads.push_back(parts[1].heads[0]); }).empty());
  EXPECT_FALSE(faults([](auto& parts) { parts[1].heads.clear(); }).empty());
  EXPECT_FALSE(faults([](auto& parts) { parts[1].q_padding[0].push_back({0, 1}); }).empty());
}

TEST_P(ValidateMutation, PartsOfAnotherPlanAreRefused) {
  EXPECT_FALSE(faults([](auto& parts) { parts.pop_back(); }).empty());
  EXPECT_FALSE(faults([](auto& parts) { std::swap(parts[0], parts[1]); }).empty());
  EXPECT_FALSE(faults([](auto& parts) { parts[1].problem.scale = 2; }).empty());
  EXPECT_FALSE(faults([](auto& parts) { parts[1].kv_rows[2] = 5; }).empty());
  EXPECT_FALSE(faults([](auto& parts) { parts[1].world = 5; }).empty());
  EXPECT_FALSE(faults([](auto& parts) { parts[1].forward.pop_back(); }).empty());
  EXPECT_FALSE(validate(plan_, causal(16)).empty());
  EXPECT_FALSE(validate(plan_, causal(15)).empty());
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, ValidateMutation,
    ::testing::Values(Built{Schedule::kRing, GradRoute::kFromOwner}, Built{Schedule::kRing, GradRoute::kFromNext},
                      Built{Schedule::kGather, GradRoute::kFromNext}, Built{Schedule::kUlysses, GradRoute::kFromNext},
                      Built{Schedule::hybrid(2), GradRoute::kFromOwner},
                      Built{Schedule::hybrid(2), GradRoute::kFromNext}, Built{Schedule::kPruned, GradRoute::kFromNext},
                      Built{Schedule::kQRing, GradRoute::kFromOwner}, Built{Schedule::kQRing, GradRoute::kFromNext},
                      Built{Schedule::double_ring(2), GradRoute::kFromNext}),
    [](const auto& test) {
      std::string name = name_of(test.param.schedule);
      std::replace(name.begin(), name.end(), ':', '_');
      return name + (test.param.route == GradRoute::kFromOwner ? "_from_owner" : "_from_next");
    });

TEST(Validate, ProvesEveryPlanThatIsBuilt) {
  for (int64_t length = 0; length <= 17; ++length) {
    for (int64_t world = 1; world <= 4; ++world) {
      for (const ShardMap& map : {ShardMap::contiguous(length, world), ShardMap::head_tail(length, world),
                                  ShardMap::striped(length, world)}) {
        for (const Schedule& schedule : schedules_for(world)) {
          for (GradRoute route : {GradRoute::kFromOwner, GradRoute::kFromNext}) {
            const Plan plan = build_plan(problem_of(length, length), causal(length), map, map, schedule, route);
            ASSERT_EQ(joined(validate(plan, plan.mask())), "") << length << " on " << world << ' ' << name_of(schedule);
          }
        }
      }
    }
  }
  for (const auto& [name, map] : testing::maps_of_sixteen()) {
    for (const Schedule& schedule : schedules_for(map.world())) {
      const Plan plan = build_plan(problem_of(16, 16, 3), documents_by_lengths(16, {{3, 5, 2, 6}, {2, 0, 7}, {16}}, {}),
                                   map, schedule);
      EXPECT_EQ(joined(validate(plan, plan.mask())), "") << name << ' ' << name_of(schedule);
    }
  }
  const ShardMap q_map = ShardMap::from_segments(9, {{{{.begin = 4, .length = 2}}, {{.begin = 7, .length = 1}}}});
  for (const Schedule& schedule : schedules_for(2)) {
    const Plan cross = build_plan(problem_of(9, 12), MaskSpec::causal(9, 12, Corner::kBottomRight), q_map,
                                  ShardMap::striped(12, 2), schedule);
    EXPECT_EQ(joined(validate(cross, cross.mask())), "") << name_of(schedule);
  }
}

TEST(Validate, ScalesWithTilesNotPairs) {
  const ShardMap map = ShardMap::striped(int64_t{1} << 24, 32);
  const Plan plan = build_plan(problem_of(1 << 24, 1 << 24), causal(1 << 24), map, Schedule::kRing);
  EXPECT_EQ(joined(validate(plan, plan.mask())), "");
}

TEST(Validate, CapsTheListOfFaults) {
  const Plan plan = build_plan(problem_of(600, 600), documents_by_lengths(600, {std::vector<int64_t>(200, 3)}, {}),
                               ShardMap::contiguous(600, 2), Schedule::kRing);
  const std::vector<std::string> faults = validate(plan, MaskSpec(600, 600, {{}}));
  EXPECT_EQ(faults.size(), 65u);
  EXPECT_EQ(faults.back(), "and 338 more");
}

}  // namespace
}  // namespace ringspan
