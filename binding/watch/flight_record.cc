#include "binding/watch/flight_record.h"

#include <utility>

#include "ringspan/base/error.h"

namespace ringspan::binding {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

}  // namespace

std::string Reached::str() const {
  if (step < 0) return "before step 0";
  std::string text = concat("step ", step);
  if (!tensors.empty()) {
    text += concat(waits ? ", waiting for " : ", posting ", tensors, " of rank ", owner, " from rank ", from,
                   " to rank ", to);
  }
  return text;
}

int64_t FlightRecord::begin(FlightEntry entry) {
  entry.begun = now();
  const std::lock_guard lock(mutex_);
  entries_.push_back(std::move(entry));
  if (entries_.size() > kMost) entries_.pop_front();
  return num_begun_++;
}

FlightEntry* FlightRecord::find(int64_t entry) {
  const int64_t place = entry - (num_begun_ - static_cast<int64_t>(entries_.size()));
  return place < 0 ? nullptr : &entries_[static_cast<size_t>(place)];
}

void FlightRecord::agree(int64_t entry) {
  const std::lock_guard lock(mutex_);
  if (FlightEntry* one = find(entry)) one->agreed = now();
}

void FlightRecord::reach(int64_t entry, const Reached& reached) {
  const std::lock_guard lock(mutex_);
  if (FlightEntry* one = find(entry)) one->reached = reached;
}

void FlightRecord::end(int64_t entry, const std::string& outcome) {
  const std::lock_guard lock(mutex_);
  FlightEntry* one = find(entry);
  if (!one || !one->outcome.empty()) return;
  one->ended = now();
  one->outcome = outcome;
}

Reached FlightRecord::reached(int64_t entry) const {
  const std::lock_guard lock(mutex_);
  const FlightEntry* one = const_cast<FlightRecord*>(this)->find(entry);
  return one ? one->reached : Reached{};
}

std::vector<FlightEntry> FlightRecord::entries() const {
  const std::lock_guard lock(mutex_);
  return {entries_.begin(), entries_.end()};
}

}  // namespace ringspan::binding
