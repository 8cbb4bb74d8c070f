// validate() accepts every plan that is built, and finds every single fault put into one.
#include "ringspan/plan/validate.h"

#include <functional>
#include <random>
#include <string>

#include <gtest/gtest.h>

#include "tests/ringspan/plan/plan_cases.h"

namespace ringspan {
namespace {

using testing::causal;
using testing::problem_of;

std::string joined(const std::vector<std::string>& faults) {
  std::string text;
  for (const std::string& fault : faults) text += fault + "\n";
  return text;
}

class ValidateMutation : public ::testing::TestWithParam<GradRoute> {
 protected:
  ValidateMutation()
      : plan_(build_plan(problem_of(16, 16, 2), documents_by_lengths(16, {{3, 5, 8}, {16}}, {}),
                         ShardMap::head_tail(16, 4), ShardMap::head_tail(16, 4), Schedule::kRing, GetParam())) {
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
    for (int64_t rank : {0, 3}) {
      for (bool forward : {true, false}) {
        for (int64_t s = 0; s < plan_.world(); ++s) {
          for (int which : {0, 1}) {
            for (const auto& [name, change] : changes) {
              for (size_t k = 0;; ++k) {
                bool found = false;
                const std::vector<std::string> result = faults([&](std::vector<RankPlan>& parts) {
                  std::vector<Step>& steps = forward ? parts[rank].forward : parts[rank].backward;
                  std::vector<Item>* list = list_of(steps[s], which);
                  if (list == nullptr || k >= list->size()) return;
                  found = true;
                  change((*list)[k]);
                });
                if (!found) break;
                ++num_changes;
                ASSERT_FALSE(result.empty()) << name << ": rank " << rank << " step " << s << " item " << k;
              }
            }
          }
        }
      }
    }
    EXPECT_GT(num_changes, 50);
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
  expect_all_found<Transfer>([](Step& step, int which) { return which == 0 ? &step.before : &step.after; },
                             {{"step", [](Transfer& t) { ++t.step; }},
                              {"source", [](Transfer& t) { t.src = (t.src + 1) % 4; }},
                              {"destination", [](Transfer& t) { t.dst = (t.dst + 1) % 4; }},
                              {"destination out of range", [](Transfer& t) { t.dst = 4; }},
                              {"payload", [](Transfer& t) { t.payload = Payload::kQ; }},
                              {"owner", [](Transfer& t) { t.owner = (t.owner + 1) % 4; }},
                              {"owner out of range", [](Transfer& t) { t.owner = -1; }},
                              {"batch", [](Transfer& t) { --t.batch_end; }},
                              {"heads", [](Transfer& t) { ++t.head_begin; }},
                              {"rows", [](Transfer& t) { --t.rows[0].end; }},
                              {"no rows", [](Transfer& t) { t.rows.clear(); }},
                              {"source slot", [](Transfer& t) { ++t.src_slot; }},
                              {"destination slot", [](Transfer& t) { ++t.dst_slot; }}});
}

// The same change on both sides leaves the messages matched; the slots and routes must show it.
TEST_P(ValidateMutation, ChangesOfWholeHopsAreFound) {
  const std::pair<const char*, std::function<void(Transfer&)>> changes[] = {
      {"source slot", [](Transfer& t) { t.src_slot = 3; }},
      {"destination slot", [](Transfer& t) { t.dst_slot = 3; }},
      {"into the slot that is sent", [](Transfer& t) { t.dst_slot = t.src_slot; }},
      {"owner", [](Transfer& t) { t.owner = (t.owner + 1) % 4; }},
      {"backwards around the ring", [](Transfer& t) { t.dst = (t.src + 3) % 4; }},
      {"rows", [](Transfer& t) { t.rows = {{0, 3}}; }}};
  for (const auto& [name, change] : changes) {
    for (bool forward : {true, false}) {
      for (size_t s = 0; s < 4; ++s) {
        for (bool before : {true, false}) {
          int num_changes = 0;
          const std::vector<std::string> result = faults([&](std::vector<RankPlan>& parts) {
            for (RankPlan& part : parts) {
              Step& step = (forward ? part.forward : part.backward)[s];
              for (Transfer& transfer : before ? step.before : step.after) change(transfer), ++num_changes;
            }
          });
          EXPECT_EQ(result.empty(), num_changes == 0) << name << " step " << s;
        }
      }
    }
  }
}

TEST_P(ValidateMutation, DroppedAndDoubledItemsAreFound) {
  for (bool doubled : {false, true}) {
    for (bool forward : {true, false}) {
      for (size_t s = 0; s < 4; ++s) {
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

// One K or V hop is left out, or listed twice, by all ranks alike.
TEST_P(ValidateMutation, WholeHopsLeftOutOrRepeatedAreFound) {
  for (Payload payload : {Payload::kK, Payload::kV, Payload::kDk, Payload::kDv}) {
    for (size_t s = 0; s < 4; ++s) {
      for (bool repeated : {false, true}) {
        bool changed = false;
        const std::vector<std::string> result = faults([&](std::vector<RankPlan>& parts) {
          for (RankPlan& part : parts) {
            for (std::vector<Transfer>* list : {&part.backward[s].before, &part.backward[s].after}) {
              std::vector<Transfer> edited;
              for (const Transfer& transfer : *list) {
                const bool is_hit = transfer.payload == payload;
                changed |= is_hit;
                for (int copies = is_hit ? (repeated ? 2 : 0) : 1; copies > 0; --copies) edited.push_back(transfer);
              }
              *list = edited;
            }
          }
        });
        EXPECT_EQ(result.empty(), !changed) << name_of(payload) << " step " << s << (repeated ? " twice" : " missing");
      }
    }
  }
}

TEST_P(ValidateMutation, EveryChangeOfAStepIsFound) {
  const std::pair<const char*, std::function<void(Step&)>> changes[] = {
      {"number", [](Step& step) { ++step.step; }},
      {"owner", [](Step& step) { step.kv_owner = (step.kv_owner + 1) % 4; }},
      {"owner out of range", [](Step& step) { step.kv_owner = 4; }},
      {"slot", [](Step& step) { step.kv_slot = (step.kv_slot + 1) % 3; }}};
  const std::pair<const char*, std::function<void(Step&)>> gradient_changes[] = {
      {"gradient slot", [](Step& step) { step.grad_slot = (step.grad_slot + 1) % 3; }},
      {"gradient begins", [](Step& step) { step.grad_begins = !step.grad_begins; }}};
  for (size_t s = 0; s < 4; ++s) {
    for (const auto& [name, change] : changes) {
      EXPECT_FALSE(faults([&](auto& parts) { change(parts[1].forward[s]); }).empty()) << name << " " << s;
      EXPECT_FALSE(faults([&](auto& parts) { change(parts[1].backward[s]); }).empty()) << name << " " << s;
    }
    for (const auto& [name, change] : gradient_changes) {
      EXPECT_FALSE(faults([&](auto& parts) { change(parts[3].backward[s]); }).empty()) << name << " " << s;
    }
  }
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

INSTANTIATE_TEST_SUITE_P(Routes, ValidateMutation, ::testing::Values(GradRoute::kFromOwner, GradRoute::kFromNext));

TEST(Validate, ProvesEveryPlanThatIsBuilt) {
  for (int64_t length = 0; length <= 17; ++length) {
    for (int64_t world = 1; world <= 4; ++world) {
      for (const ShardMap& map : {ShardMap::contiguous(length, world), ShardMap::head_tail(length, world),
                                  ShardMap::striped(length, world)}) {
        for (GradRoute route : {GradRoute::kFromOwner, GradRoute::kFromNext}) {
          const Plan plan = build_plan(problem_of(length, length), causal(length), map, map, Schedule::kRing, route);
          ASSERT_EQ(joined(validate(plan, plan.mask())), "") << length << " on " << world;
        }
      }
    }
  }
  for (const auto& [name, map] : testing::maps_of_sixteen()) {
    const Plan plan = build_plan(problem_of(16, 16, 3), documents_by_lengths(16, {{3, 5, 2, 6}, {2, 0, 7}, {16}}, {}),
                                 map, Schedule::kRing);
    EXPECT_EQ(joined(validate(plan, plan.mask())), "") << name;
  }
  const ShardMap q_map = ShardMap::from_segments(9, {{{{.begin = 4, .length = 2}}, {{.begin = 7, .length = 1}}}});
  const Plan cross = build_plan(problem_of(9, 12), MaskSpec::causal(9, 12, Corner::kBottomRight), q_map,
                                ShardMap::striped(12, 2), Schedule::kRing);
  EXPECT_EQ(joined(validate(cross, cross.mask())), "");
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
  EXPECT_EQ(faults.back(), "and 340 more");
}

}  // namespace
}  // namespace ringspan
