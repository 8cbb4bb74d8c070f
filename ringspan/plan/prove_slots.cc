#include <algorithm>
#include <utility>

#include "ringspan/plan/proof.h"

namespace ringspan::detail {
namespace {

bool is_kv(Payload payload) { return payload == Payload::kK || payload == Payload::kV; }

bool is_gradient(Payload payload) { return payload == Payload::kDk || payload == Payload::kDv; }

// Follows what the K/V slots of one rank hold, step by step.
class SlotWatch {
 public:
  SlotWatch(const Phase& phase, Faults& faults) : phase_(phase), faults_(faults) {
    for (Payload payload : {Payload::kK, Payload::kV}) owner_in_[{payload, kOwnSlot}] = phase.part.rank;
  }

  void watch(const Step& step) {
    for (Payload payload : {Payload::kK, Payload::kV}) {
      if (holds(payload, step.kv_slot, step.kv_owner)) continue;
      faults_.add(phase_.where(step), ": reads ", name_of(payload), " of rank ", step.kv_owner, " from slot ",
                  step.kv_slot, ", where it has not arrived");
    }
    for (const Transfer& transfer : step.before) {
      if (is_kv(transfer.payload) && transfer.src == phase_.part.rank) watch_send(step, transfer);
    }
    std::vector<std::pair<Payload, int64_t>> written;
    for (const Transfer& transfer : step.before) {
      if (!is_kv(transfer.payload) || transfer.dst != phase_.part.rank) continue;
      watch_receive(step, transfer);
      const std::pair target(transfer.payload, transfer.dst_slot);
      if (std::find(written.begin(), written.end(), target) != written.end()) {
        faults_.add(phase_.where(step), ": receives ", name_of(transfer.payload), " into slot ", transfer.dst_slot,
                    " twice");
      }
      written.push_back(target);
    }
    for (const Transfer& transfer : step.before) {
      if (is_kv(transfer.payload) && transfer.dst == phase_.part.rank) {
        owner_in_[{transfer.payload, transfer.dst_slot}] = transfer.owner;
      }
    }
  }

 private:
  bool holds(Payload payload, int64_t slot, int64_t owner) const {
    const auto found = owner_in_.find({payload, slot});
    return found != owner_in_.end() && found->second == owner;
  }

  void watch_send(const Step& step, const Transfer& transfer) {
    if (holds(transfer.payload, transfer.src_slot, transfer.owner)) return;
    faults_.add(phase_.where(step), ": sends ", name_of(transfer.payload), " of rank ", transfer.owner, " from slot ",
                transfer.src_slot, ", which does not hold it");
  }

  void watch_receive(const Step& step, const Transfer& transfer) {
    const int64_t slot = transfer.dst_slot;
    const auto complain = [&](const char* why) {
      faults_.add(phase_.where(step), ": receives ", name_of(transfer.payload), " into slot ", slot, ", ", why);
    };
    if (slot == kOwnSlot) complain("which is the caller's");
    if (slot == step.kv_slot) complain("which the tiles of this step read");
    for (const Transfer& other : step.before) {
      const bool is_sent = other.src == phase_.part.rank && other.payload == transfer.payload && other.src_slot == slot;
      if (is_sent) complain("which is being sent");
    }
  }

  const Phase& phase_;
  Faults& faults_;
  std::map<std::pair<Payload, int64_t>, int64_t> owner_in_;
};

void prove_transfer(const Phase& phase, const Step& step, const Transfer& transfer, bool is_before, Faults& faults) {
  const RankPlan& part = phase.part;
  const auto complain = [&](const auto&... why) {
    faults.add(phase.where(step), ": ", name_of(transfer.payload), " from rank ", transfer.src, " to ", transfer.dst,
               " ", why...);
  };
  const auto is_rank = [&](int64_t rank) { return 0 <= rank && rank < part.world; };
  if (!is_rank(transfer.src) || !is_rank(transfer.dst) || transfer.src == transfer.dst) {
    complain("is not between two of ", part.world, " ranks");
  } else if (transfer.src != part.rank && transfer.dst != part.rank) {
    complain("does not concern rank ", part.rank);
  }
  for (int64_t slot : {transfer.src_slot, transfer.dst_slot}) {
    if (slot < 0 || slot >= kNumSlots) complain("uses slot ", slot, " of ", kNumSlots);
  }
  if (transfer.step != step.step) complain("names step ", transfer.step);
  if (!is_rank(transfer.owner)) {
    complain("has owner ", transfer.owner);
  } else if (!is_whole(transfer, part)) {
    complain("carries not all of the ", part.kv_rows[transfer.owner], " rows of rank ", transfer.owner);
  }
  const bool is_expected = is_before ? is_kv(transfer.payload) : is_gradient(transfer.payload);
  if (!is_expected) complain("is out of place ", is_before ? "before" : "after", " the tiles");
}

}  // namespace

bool is_whole(const Transfer& transfer, const RankPlan& part) {
  const bool heads = transfer.head_begin == 0 && transfer.head_end == part.problem.kv_heads;
  const bool batch = transfer.batch_begin == 0 && transfer.batch_end == part.problem.batch;
  int64_t next = 0;
  for (const RowRange& range : transfer.rows) {
    if (range.begin != next || range.end < range.begin) return false;
    next = range.end;
  }
  return heads && batch && next == part.kv_rows[transfer.owner];
}

void prove_slots(const Phase& phase, Faults& faults) {
  SlotWatch watch(phase, faults);
  for (const Step& step : phase.steps) {
    for (const Transfer& transfer : step.before) prove_transfer(phase, step, transfer, true, faults);
    for (const Transfer& transfer : step.after) prove_transfer(phase, step, transfer, false, faults);
    watch.watch(step);
  }
}

}  // namespace ringspan::detail
