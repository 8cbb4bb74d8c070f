#include "ringspan/plan/slot_book.h"

#include <algorithm>
#include <numeric>

namespace ringspan {

SlotBook::SlotBook(const RankPlan& part, const std::vector<Step>& steps, Exchange exchange)
    : part_(part), exchange_(exchange), uses_(part, steps) {}

void SlotBook::post(std::span<const Transfer> transfers) {
  if (transfers.empty()) return;
  for (const Transfer& t : transfers) {
    if (t.is_sent()) continue;
    Journey& copy = journeys_.emplace_back();
    copy.needed_by = t.needed_by;
    copy.gradients = is_gradient(t.payload);
    copy.arrivals.push_back({&t, {.bytes = bytes_of(t, part_.problem)}});
  }
  for (const Post& post : posts_of(transfers, part_.problem)) post_message(post);
}

void SlotBook::post_message(const Post& post) {
  Journey journey{.needed_by = post.needed_by,
                  .gradients = post.gradients,
                  .post = post,
                  .is_gathered = is_gathered(post, exchange_)};
  plan_sizes(journey);
  // Nothing reads any more what lay there; the memory may be used again.
  for (const Transfer* t : post.transfers) {
    if (t->dst == part_.rank && replaces_slot(*t, part_.problem)) free_slot({t->payload, t->to.slot});
  }
  const int64_t total = journey.is_gathered
                            ? gathered_bytes(post, part_.problem)
                            : std::accumulate(journey.sent_bytes.begin(), journey.sent_bytes.end(), int64_t{0});
  const Area ready = ready_message(post);
  if (ready.block != kNoBlock) {
    journey.sent = ready;
    share(ready.block);
  } else if (total > 0) {
    journey.sent = {allocate(total), 0, total};
    journey.is_packed = true;
    on_make(journey.sent.block, total, post.transfers.front()->payload);
    plan_packing(journey);
  }
  journey.received.bytes = std::accumulate(journey.received_bytes.begin(), journey.received_bytes.end(), int64_t{0});
  journey.received.block = allocate(journey.received.bytes);
  journeys_.push_back(std::move(journey));
  on_start(journeys_.back());
  take_pieces(journeys_.back());
}

void SlotBook::plan_sizes(Journey& journey) const {
  const int64_t padded = journey.is_gathered ? gathered_bytes(journey.post, part_.problem) : 0;
  journey.sent_bytes.assign(static_cast<size_t>(part_.world), padded);
  journey.received_bytes.assign(static_cast<size_t>(part_.world), padded);
  if (journey.is_gathered) return;
  for (const Transfer* t : journey.post.transfers) {
    const int64_t bytes = bytes_of(*t, part_.problem);
    if (t->src == part_.rank) journey.sent_bytes[static_cast<size_t>(t->dst)] += bytes;
    if (t->dst == part_.rank) journey.received_bytes[static_cast<size_t>(t->src)] += bytes;
  }
}

// The bytes that can be sent as they lie.
SlotBook::Area SlotBook::ready_message(const Post& post) const {
  Area ready;
  int64_t dst = -1;
  for (const Transfer* t : post.transfers) {
    if (t->src != part_.rank) continue;
    const auto found = slots_.find({t->payload, t->from.slot});
    if (found == slots_.end() || !fills_slot(*t, t->from, part_.problem)) return {};
    const Area& area = found->second.area;
    const bool is_first = ready.block == kNoBlock;
    const bool follows = area.block == ready.block && area.offset == ready.offset + ready.bytes && t->dst == dst;
    if (!is_first && !follows) return {};
    if (is_first) ready = {area.block, area.offset, 0};
    ready.bytes += area.bytes;
    dst = t->dst;
  }
  return ready;
}

// What goes to each rank, in the order of the ranks; the same rows once where all ranks get them.
void SlotBook::plan_packing(Journey& journey) const {
  std::vector<int64_t> next(journey.sent_bytes.size(), 0);
  if (!journey.is_gathered)
    std::exclusive_scan(journey.sent_bytes.begin(), journey.sent_bytes.end(), next.begin(), int64_t{0});
  int64_t dst = -1;
  for (const Transfer* t : journey.post.transfers) {
    if (t->src != part_.rank || (journey.is_gathered && dst >= 0 && t->dst != dst)) continue;
    dst = t->dst;
    const int64_t bytes = bytes_of(*t, part_.problem);
    int64_t& offset = next[static_cast<size_t>(dst)];
    journey.packed.push_back({t, {journey.sent.block, offset, bytes}});
    offset += bytes;
  }
}

void SlotBook::take_pieces(Journey& journey) {
  int64_t begin = 0;
  for (int64_t src = 0; src < part_.world; ++src) {
    int64_t offset = begin;
    for (const Transfer* t : journey.post.transfers) {
      if (t->src != src || t->dst != part_.rank) continue;
      const Area area{journey.received.block, offset, bytes_of(*t, part_.problem)};
      offset += area.bytes;
      if (replaces_slot(*t, part_.problem)) {
        share(area.block);
        slots_[{t->payload, t->to.slot}] = {area, t->to.rows, t->to.head_end - t->to.head_begin};
      } else {
        journey.arrivals.push_back({t, area});
      }
    }
    begin += journey.received_bytes[static_cast<size_t>(src)];
  }
}

bool SlotBook::awaits(int64_t step, bool gradients) const {
  return std::any_of(journeys_.begin(), journeys_.end(),
                     [&](const Journey& journey) { return journey.is_due(step, gradients); });
}

void SlotBook::wait(int64_t step, bool gradients) {
  std::vector<const Journey*> due;
  std::vector<MessagePart> arrivals;
  for (const Journey& journey : journeys_) {
    if (!journey.is_due(step, gradients)) continue;
    due.push_back(&journey);
    arrivals.insert(arrivals.end(), journey.arrivals.begin(), journey.arrivals.end());
  }
  if (!due.empty()) {
    on_finish(due);
    for (const Journey* journey : due) {
      if (journey->sent.block != kNoBlock) release(journey->sent.block);
    }
    // In the order of the plan, which is that of the additions; the transfers of a list lie one behind the other.
    std::stable_sort(arrivals.begin(), arrivals.end(), [](const MessagePart& a, const MessagePart& b) {
      return a.transfer->step != b.transfer->step ? a.transfer->step < b.transfer->step : a.transfer < b.transfer;
    });
    for (const MessagePart& piece : arrivals) {
      const BufferPlace& to = piece.transfer->to;
      if (to.slot != kOwnSlot) slot(piece.transfer->payload, to.slot, to.rows, {to.head_begin, to.head_end});
      on_arrival(piece);
    }
    for (auto journey = journeys_.begin(); journey != journeys_.end();) {
      if (!journey->is_due(step, gradients)) {
        ++journey;
        continue;
      }
      if (journey->received.block != kNoBlock) release(journey->received.block);
      journey = journeys_.erase(journey);
    }
  }
  free_done_slots(step, gradients);
}

SlotBook::Area SlotBook::slot(Payload payload, const Operand& operand) {
  return slot(payload, operand.slot, operand.rows, heads_of(payload, part_.problem, operand));
}

SlotBook::Area SlotBook::slot(Payload payload, int64_t slot, int64_t rows, const HeadRange& range) {
  const int64_t heads = range.end - range.begin;
  const auto found = slots_.find({payload, slot});
  if (found != slots_.end() && found->second.rows == rows && found->second.heads == heads) return found->second.area;
  const bool is_pair = payload == Payload::kDk || payload == Payload::kDv;
  const std::vector<Payload> payloads = is_pair ? std::vector{Payload::kDk, Payload::kDv} : std::vector{payload};
  int64_t bytes = 0;
  for (const Payload one : payloads) bytes += bytes_in(one, rows, heads);
  const Block block = allocate(bytes);
  on_make(block, bytes, payload);
  int64_t offset = 0;
  for (const Payload one : payloads) {
    free_slot({one, slot});
    share(block);
    const Area area{block, offset, bytes_in(one, rows, heads)};
    slots_[{one, slot}] = {area, rows, heads};
    offset += area.bytes;
  }
  release(block);
  return slots_.at({payload, slot}).area;
}

SlotBook::Block SlotBook::allocate(int64_t bytes) {
  live_ += bytes;
  most_ = std::max(most_, live_);
  blocks_[next_block_] = {bytes, 1};
  return next_block_++;
}

void SlotBook::release(Block block) {
  BlockUse& use = blocks_.at(block);
  if (--use.users > 0) return;
  live_ -= use.bytes;
  blocks_.erase(block);
  on_free(block);
}

void SlotBook::free_slot(const Slot& slot) {
  const auto found = slots_.find(slot);
  if (found == slots_.end()) return;
  const Block block = found->second.area.block;
  slots_.erase(found);
  release(block);
}

void SlotBook::free_done_slots(int64_t step, bool gradients) {
  std::vector<Slot> done;
  for (const auto& [slot, held] : slots_) {
    if (is_gradient(slot.first) == gradients && uses_.is_done(slot.first, slot.second, step)) done.push_back(slot);
  }
  for (const Slot& slot : done) free_slot(slot);
}

int64_t SlotBook::bytes_in(Payload payload, int64_t rows, int64_t heads) const {
  const PayloadSize size = size_of(payload, part_.problem);
  return size.batch * heads * rows * size.dim * size.element_bytes;
}

}  // namespace ringspan
