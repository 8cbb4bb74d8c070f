// PlanCache: plans of earlier calls, found by the full content of the call. Bounded, thread-safe, and no part of a
// result: a plan that was forgotten is built again.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "ringspan/plan/plan.h"

namespace ringspan::binding {

class PlanCache {
 public:
  static constexpr size_t kMaxEntries = 64;
  // A plan and its key grow with the number of documents; above this many tiles and words in all, old entries leave.
  static constexpr size_t kMaxWeight = size_t{1} << 22;

  using Words = std::vector<int64_t>;
  using Build = std::function<RankPlan()>;

  // The plan of `words` for `rank`; `hash` is that of `words`. Builds outside the lock; keeps none where that throws.
  std::shared_ptr<const RankPlan> find_or_build(Words words, uint64_t hash, int64_t rank, const Build& build);

  size_t size() const;
  int64_t num_built() const;

  static PlanCache& process();

 private:
  struct Entry {
    uint64_t hash = 0;
    int64_t rank = 0;
    Words words;
    size_t weight = 0;
    uint64_t last_use = 0;
    std::shared_ptr<const RankPlan> plan;
  };

  const Entry* find(const Words& words, uint64_t hash, int64_t rank);
  void make_room(size_t weight);

  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  uint64_t clock_ = 0;
  size_t weight_ = 0;
  int64_t num_built_ = 0;
};

}  // namespace ringspan::binding
