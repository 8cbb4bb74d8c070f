#include "binding/op/plan_cache.h"

#include <algorithm>
#include <utility>

namespace ringspan::binding {
namespace {

size_t weight_of(const PlanCache::Words& words, const RankPlan& plan) {
  constexpr size_t kTileWords = sizeof(Tile) / sizeof(int64_t);
  size_t weight = words.size();
  for (const auto* steps : {&plan.forward, &plan.backward}) {
    for (const Step& step : *steps) weight += step.tiles.size() * kTileWords;
  }
  return weight;
}

}  // namespace

std::shared_ptr<const RankPlan> PlanCache::find_or_build(Words words, uint64_t hash, int64_t rank, const Build& build) {
  {
    const std::lock_guard lock(mutex_);
    if (const Entry* entry = find(words, hash, rank)) return entry->plan;
  }
  const auto plan = std::make_shared<const RankPlan>(build());
  const size_t weight = weight_of(words, *plan);
  const std::lock_guard lock(mutex_);
  ++num_built_;
  if (const Entry* entry = find(words, hash, rank)) return entry->plan;
  make_room(weight);
  entries_.push_back({hash, rank, std::move(words), weight, ++clock_, plan});
  weight_ += weight;
  return plan;
}

const PlanCache::Entry* PlanCache::find(const Words& words, uint64_t hash, int64_t rank) {
  for (Entry& entry : entries_) {
    if (entry.hash != hash || entry.rank != rank || entry.words != words) continue;
    entry.last_use = ++clock_;
    return &entry;
  }
  return nullptr;
}

void PlanCache::make_room(size_t weight) {
  while (!entries_.empty() && (entries_.size() >= kMaxEntries || weight_ + weight > kMaxWeight)) {
    const auto oldest = std::min_element(entries_.begin(), entries_.end(),
                                         [](const Entry& a, const Entry& b) { return a.last_use < b.last_use; });
    weight_ -= oldest->weight;
    entries_.erase(oldest);
  }
}

size_t PlanCache::size() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

int64_t PlanCache::num_built() const {
  const std::lock_guard lock(mutex_);
  return num_built_;
}

PlanCache& PlanCache::process() {
  static PlanCache cache;
  return cache;
}

}  // namespace ringspan::binding
