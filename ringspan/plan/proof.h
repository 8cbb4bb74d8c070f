// The parts of validate(): each proves one kind of property and words its faults. Parts of a plan are shown one rank at
// a time; what must hold between ranks is remembered and judged at the end.
#pragma once

#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "ringspan/base/error.h"
#include "ringspan/plan/plan.h"

namespace ringspan::detail {

// The faults found so far; after kMost of them the others are only counted.
class Faults {
 public:
  template <class... Parts>
  void add(const Parts&... parts) {
    if (texts_.size() < kMost) texts_.push_back(concat(parts...));
    ++count_;
  }
  std::vector<std::string> take();

 private:
  static constexpr size_t kMost = 64;
  std::vector<std::string> texts_;
  size_t count_ = 0;
};

// One of the two lists of steps of a part.
struct Phase {
  const RankPlan& part;
  const std::vector<Step>& steps;
  const char* name = "";  // "forward", "backward"

  std::string where(const Step& step) const { return concat("rank ", part.rank, " ", name, " step ", step.step); }
};

// Whether the transfer carries all rows of its owner, all batch entries and all KV heads.
bool is_whole(const Transfer& transfer, const RankPlan& part);

// The tiles keep the pairs of the mask, each once. Cost: near the number of tiles times the bands that each meets.
void prove_pairs(const Plan& plan, const MaskSpec& mask, const Phase& phase, Faults& faults);

// What a step reads has arrived, and nothing in use or in flight is written.
void prove_slots(const Phase& phase, Faults& faults);

// Every send has a receive that is listed alike.
class Meetings {
 public:
  void add(const Phase& phase, Faults& faults);
  void finish(Faults& faults) const;

 private:
  // phase, before or after, step, src, dst, payload, owner, batch and head ranges, slots, rows
  using Key = std::tuple<std::string, std::string, int64_t, int64_t, int64_t, Payload, int64_t, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int64_t, std::vector<int64_t>>;
  std::map<Key, int64_t> balance_;  // listed by the source minus listed by the destination
};

// The gradient of each K/V gathers the part of every rank once and comes home.
class GradientRoutes {
 public:
  explicit GradientRoutes(int64_t world) : world_(world), ranks_(world) {}
  void add(const Phase& backward);
  void finish(Faults& faults) const;

  // What one rank does to gradients in one step.
  struct Visit {
    int64_t owner = 0, slot = 0;
    bool begins = true;
    std::vector<Transfer> sends;
  };

 private:
  int64_t world_;
  std::vector<std::vector<Visit>> ranks_;  // [rank][step]
};

}  // namespace ringspan::detail
