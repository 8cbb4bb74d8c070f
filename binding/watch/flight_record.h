// FlightRecord: the last calls of a rank in a group, to be read when something went wrong.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace ringspan::binding {

// Where a call is: in which step of its plan, and at which transfer.
struct Reached {
  int64_t step = -1;                       // -1: before the first
  bool waits = false;                      // for what was posted
  std::string_view tensors = "";           // "k and v", of static storage; "" no transfer of a plan
  int64_t owner = -1, from = -1, to = -1;  // ranks: whose rows travel, and between whom

  // "step 1, waiting for k and v of rank 0 from rank 0 to rank 1"
  std::string str() const;
};

struct FlightEntry {
  int64_t number = 0;   // of the call in its group; 0 where the caller vouched for agreement
  std::string kind{};   // "forward", "backward of call 3", "other"
  std::string place{};  // where the program made it; "" unknown
  uint64_t signature = 0;
  Reached reached{};
  // Seconds since 1970; 0: not yet.
  double begun = 0, agreed = 0, ended = 0;
  std::string outcome{};  // "" while it runs, "done", or the error
};

// Thread-safe.
class FlightRecord {
 public:
  static constexpr size_t kMost = 64;

  // Entries are known by an ever growing number.
  int64_t begin(FlightEntry entry);
  void agree(int64_t entry);
  void reach(int64_t entry, const Reached& reached);
  void end(int64_t entry, const std::string& outcome);
  Reached reached(int64_t entry) const;

  std::vector<FlightEntry> entries() const;  // the oldest first

 private:
  FlightEntry* find(int64_t entry);

  mutable std::mutex mutex_;
  std::deque<FlightEntry> entries_;
  int64_t num_begun_ = 0;
};

}  // namespace ringspan::binding
