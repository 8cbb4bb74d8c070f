// Who allocates what. A slot of the torch side is the piece of a message that arrived as a whole, or memory of its own
// where rows come from several messages; a slot of the core is made once, for the largest use.
//
//   posting     what was in the slots that now receive is freed; a copy of what is sent, unless it lies in one piece
//               already; the message that arrives
//   waiting     the copy is freed; rows that arrived for a part of a slot move there, and their message is freed
//   computing   slots that gradients begin in; results of heads that are given back later
#include "ringspan/ledger/peak.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "ringspan/plan/schedules/builder.h"
#include "ringspan/plan/slot_uses.h"
#include "ringspan/plan/walk.h"

namespace ringspan::detail {
namespace {

// What is allocated now, and the most that ever was.
class Memory {
 public:
  using Block = int64_t;

  Block allocate(int64_t bytes) {
    live_ += bytes;
    most_ = std::max(most_, live_);
    blocks_[next_] = {bytes, 1};
    return next_++;
  }
  void share(Block block) { ++blocks_.at(block).second; }
  void release(Block block) {
    auto& [bytes, users] = blocks_.at(block);
    if (--users > 0) return;
    live_ -= bytes;
    blocks_.erase(block);
  }
  int64_t most() const { return most_; }

 private:
  int64_t live_ = 0, most_ = 0;
  Block next_ = 0;
  std::map<Block, std::pair<int64_t, int64_t>> blocks_;  // bytes, users
};

using Slot = std::pair<Payload, int64_t>;

// Whether the rows are one piece of a dense tensor [batch, heads, rows, dim].
bool is_one_piece(const Transfer& t, const Place& place, const RankPlan& part) {
  const PayloadSize size = size_of(t.payload, part.problem);
  const bool is_own = place.slot == kOwnSlot;
  const int64_t rows = is_own ? part.local_rows(t.payload, t.owner) : place.rows;
  const int64_t heads = is_own ? size.heads : place.head_end - place.head_begin;
  const bool all_rows = t.num_rows() == rows, one_head = t.head_end - t.head_begin <= 1;
  const bool all_heads = t.head_end - t.head_begin == heads, one_entry = t.batch_end - t.batch_begin <= 1;
  if (t.rows.size() > 1 || (!is_own && place.stride > 1)) return false;
  return (all_rows || (one_head && one_entry)) && (all_heads || one_entry);
}

class Replay {
 public:
  Replay(const RankPlan& part, std::optional<Exchange> exchange, bool backward)
      : part_(part), exchange_(exchange), backward_(backward), uses_(part, steps()) {}

  int64_t run(int64_t always) {
    memory_.allocate(always);
    walk(steps(), *this);
    return memory_.most();
  }

  // The acts of the walk.
  void post(std::span<const Transfer> transfers) {
    if (!exchange_) {
      for (const Transfer& t : transfers) post_alone(t);
      return;
    }
    for (const Transfer& t : transfers) {
      if (!t.is_sent()) flights_.push_back({t.needed_by, is_gradient(t.payload), {}, {}, {&t}});
    }
    for (const Post& post : posts_of(transfers, part_.problem)) {
      post_together(post);
    }
  }
  void wait(int64_t step, bool gradients) {
    std::vector<Flight> left;
    for (Flight& flight : flights_) {
      if (flight.needed_by > step || flight.gradients != gradients) {
        left.push_back(std::move(flight));
        continue;
      }
      for (const Memory::Block block : flight.copies) memory_.release(block);
      for (const Transfer* t : flight.moves) make_slot(t->payload, t->to);
      for (const Memory::Block block : flight.arrived) memory_.release(block);
    }
    flights_ = std::move(left);
    if (!exchange_) return;
    std::vector<Slot> done;
    for (const auto& [slot, block] : slots_) {
      if (is_gradient(slot.first) == gradients && uses_.is_done(slot.first, slot.second, step)) done.push_back(slot);
    }
    for (const Slot& slot : done) free_slot(slot);
  }
  void compute(const Step& step) {
    if (!backward_) {
      for (const Payload payload : results()) make_operand({payload}, step.q, step.q.slot);
      return;
    }
    if (step.dkv.is_computed()) make_operand({Payload::kDk, Payload::kDv}, step.kv, step.dkv.slot);
    if (!step.dq.is_computed()) return;
    make_operand({Payload::kDq}, step.q, step.dq.slot);
    if (part_.problem.bias.has_gradient()) make_operand({Payload::kDbias}, step.q, step.dq.slot);
    // Queries visit: their gradient is computed apart while the other ranks' part travels.
    const bool visits = step.q.slot != kOwnSlot && step.kv.slot == kOwnSlot;
    if (visits && !step.dq.begins && !apart_) {
      apart_ = memory_.allocate(bytes_in(Payload::kDq, step.q.rows, step.q.head_end - step.q.head_begin));
    }
  }

 private:
  const std::vector<Step>& steps() const { return backward_ ? part_.backward : part_.forward; }

  struct Flight {
    int64_t needed_by = 0;
    bool gradients = false;
    std::vector<Memory::Block> copies{};   // of what is sent
    std::vector<Memory::Block> arrived{};  // messages
    std::vector<const Transfer*> moves{};  // rows that are copied out of them
  };

  void post_together(const Post& post) {
    Flight flight{post.needed_by, post.gradients};
    const bool gathers = is_gathered(post, *exchange_);
    int64_t sent = gathers ? gathered_bytes(post, part_.problem) : 0, received = part_.world * sent;
    for (const Transfer* t : post.transfers) {
      if (!gathers) (t->src == part_.rank ? sent : received) += bytes_of(*t, part_.problem);
      if (t->dst == part_.rank && replaces_slot(*t, part_.problem)) free_slot({t->payload, t->to.slot});
    }
    if (!is_ready(post)) flight.copies.push_back(memory_.allocate(sent));
    const Memory::Block message = memory_.allocate(received);
    for (const Transfer* t : post.transfers) {
      if (t->dst != part_.rank) continue;
      if (replaces_slot(*t, part_.problem)) {
        memory_.share(message);
        slots_[{t->payload, t->to.slot}] = message;
      } else {
        flight.moves.push_back(t);
      }
    }
    flight.arrived.push_back(message);
    flights_.push_back(std::move(flight));
  }

  // Whether what is sent lies in one block, whole slots to one rank, and can go as it is.
  bool is_ready(const Post& post) const {
    std::optional<Memory::Block> block;
    int64_t dst = -1;
    for (const Transfer* t : post.transfers) {
      if (t->src != part_.rank) continue;
      const auto slot = slots_.find({t->payload, t->from.slot});
      if (slot == slots_.end() || !fills_slot(*t, t->from, part_.problem)) return false;
      if ((block && *block != slot->second) || (dst >= 0 && dst != t->dst)) return false;
      block = slot->second;
      dst = t->dst;
    }
    return true;
  }

  // The core: the rows themselves where they lie in one piece, else a message of their own.
  void post_alone(const Transfer& t) {
    const bool sends = t.src == part_.rank;
    if (t.dst == part_.rank) make_slot(t.payload, t.to);
    if (!t.is_sent()) return;
    Flight flight{t.needed_by, is_gradient(t.payload)};
    const bool in_place = is_one_piece(t, sends ? t.from : t.to, part_) && !t.adds && !is_rounded(t);
    if (!in_place) flight.copies.push_back(memory_.allocate(bytes_of(t, part_.problem)));
    flights_.push_back(std::move(flight));
  }

  // A gradient that comes home in the accumulator type, to a tensor of the caller's type.
  bool is_rounded(const Transfer& t) const {
    return t.dst == part_.rank && t.to.slot == kOwnSlot && is_gradient(t.payload) &&
           part_.problem.dtype != accumulator_of(part_.problem.dtype);
  }

  void free_slot(const Slot& slot) {
    const auto found = slots_.find(slot);
    if (found == slots_.end()) return;
    memory_.release(found->second);
    slots_.erase(found);
  }

  int64_t bytes_in(Payload payload, int64_t rows, int64_t heads) const {
    const PayloadSize size = size_of(payload, part_.problem);
    return size.batch * heads * rows * size.dim * size.element_bytes;
  }

  void make_slot(Payload payload, const Place& place) {
    if (place.slot == kOwnSlot) return;
    make_slots({payload}, place.slot, bytes_in(payload, place.rows, place.head_end - place.head_begin));
  }

  // In one block. The core's slots grow; those of the torch side are made anew where they are not there.
  void make_slots(const std::vector<Payload>& payloads, int64_t slot, int64_t bytes) {
    const Slot first{payloads.front(), slot};
    int64_t& capacity = capacity_[first];
    const bool is_there = slots_.contains(first);
    if (is_there && (exchange_ || capacity >= bytes)) return;
    if (is_there) {
      for (const Payload payload : payloads) free_slot({payload, slot});
    }
    capacity = std::max(capacity, bytes);
    const Memory::Block block = memory_.allocate(bytes);
    for (const Payload payload : payloads) {
      if (payload != payloads.front()) memory_.share(block);
      slots_[{payload, slot}] = block;
    }
  }

  void make_operand(const std::vector<Payload>& payloads, Operand operand, int64_t slot) {
    if (slot == kOwnSlot) return;
    int64_t bytes = 0;
    for (const Payload payload : payloads) {
      const HeadRange heads = heads_of(payload, part_.problem, operand);
      bytes += bytes_in(payload, operand.rows, heads.end - heads.begin);
    }
    make_slots(payloads, slot, bytes);
  }

  const RankPlan& part_;
  std::optional<Exchange> exchange_;
  bool backward_;
  SlotUses uses_;
  Memory memory_;
  std::map<Slot, Memory::Block> slots_;
  std::map<Slot, int64_t> capacity_;
  std::vector<Flight> flights_;
  std::optional<Memory::Block> apart_;
};

int64_t computing_steps(const std::vector<Step>& steps) {
  return std::count_if(steps.begin(), steps.end(), [](const Step& step) { return step.computes; });
}

int64_t sum_bytes(const RankPlan& part) { return size_of(accumulator_of(part.problem.dtype)); }

bool sums_apart(const RankPlan& part) { return part.problem.dtype != accumulator_of(part.problem.dtype); }

}  // namespace

int64_t forward_peak_bytes(const RankPlan& part, std::optional<Exchange> exchange) {
  const Problem& p = part.problem;
  const int64_t rows = p.batch * p.q_heads * part.q_rows[part.rank];
  int64_t always = rows * p.v_dim * size_of(p.dtype) + 3 * rows * sum_bytes(part);
  // A call of one step keeps its sums in registers and writes the output once.
  if (sums_apart(part) && computing_steps(part.forward) > 1) {
    for (const Step& step : part.forward) {
      if (!step.computes) continue;
      always += p.batch * (step.q.head_end - step.q.head_begin) * step.q.rows * p.v_dim * sum_bytes(part);
      break;
    }
  }
  return Replay(part, exchange, false).run(always);
}

int64_t backward_peak_bytes(const RankPlan& part, std::optional<Exchange> exchange) {
  const Problem& p = part.problem;
  const int64_t q_rows = p.batch * p.q_heads * part.q_rows[part.rank];
  const int64_t kv_rows = p.batch * p.kv_heads * part.kv_rows[part.rank];
  const int64_t dq = q_rows * p.qk_dim, dkv = kv_rows * (p.qk_dim + p.v_dim);
  int64_t always = (dq + dkv) * size_of(p.dtype) + q_rows * sum_bytes(part);
  if (sums_apart(part)) {
    if (sums_at_home(part, Payload::kDq)) always += dq * sum_bytes(part);
    if (sums_at_home(part, Payload::kDk)) always += dkv * sum_bytes(part);
  }
  return Replay(part, exchange, true).run(always);
}

}  // namespace ringspan::detail
