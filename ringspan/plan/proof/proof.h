// The parts of validate(): each proves one kind of property and words its faults.
#pragma once

#include <map>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
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
  bool any() const { return count_ > 0; }

 private:
  static constexpr size_t kMost = 64;
  std::vector<std::string> texts_;
  size_t count_ = 0;
};

// One of the two lists of steps of a plan.
enum class Pass { kForward, kBackward };

inline const std::vector<Step>& steps_of(const RankPlan& part, Pass pass) {
  return pass == Pass::kForward ? part.forward : part.backward;
}
inline std::string where(const RankPlan& part, Pass pass, int64_t step) {
  return concat("rank ", part.rank, pass == Pass::kForward ? " forward" : " backward", " step ", step);
}

// Transfers in themselves and with each other: between ranks that exist, in slots that exist, rows and heads that lie
// in their buffers; each send has a receive that is listed alike; every rank posts the same kinds of messages at the
// same places, so that a collective may carry them.
void prove_transfers(std::span<const RankPlan> parts, Pass pass, Faults& faults);

// What a step computes, with the positions that its operands were found to hold.
struct Work {
  int64_t rank = 0, step = 0;
  Tile tile;
  int64_t head_begin = 0, head_end = 0;
  int64_t q_owner = 0, kv_owner = 0;
  bool gives_dq = true, gives_dkv = true;  // backward
};

// Plays a pass of all ranks with labels in the place of tensors: what a step reads or sends has arrived, nothing in use
// or in flight is written, results and gradients come home whole, with each rank's part once. Returns the tiles whose
// rows hold the positions that they name. Cost: near the number of transfers and tiles.
std::vector<Work> prove_flow(const Plan& plan, std::span<const RankPlan> parts, Pass pass, Faults& faults);

// The tiles keep the pairs of the mask, each once. Cost: near the number of tiles times the bands that each meets.
void prove_pairs(const Plan& plan, const MaskSpec& mask, Pass pass, std::vector<Work> work, Faults& faults);

}  // namespace ringspan::detail
