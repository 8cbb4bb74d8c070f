#include "ringspan/plan/slot_book.h"

#include <algorithm>
#include <utility>

namespace ringspan {

namespace {

// The transfers of which `rank` is one end, in the order of the ranks at the other one.
std::vector<const Transfer*> in_order(const Post& post, int64_t Transfer::* end, int64_t Transfer::* other,
                                      int64_t rank) {
  std::vector<const Transfer*> transfers;
  for (const Transfer* t : post.transfers) {
    if (t->*end == rank) transfers.push_back(t);
  }
  std::stable_sort(transfers.begin(), transfers.end(),
                   [&](const Transfer* a, const Transfer* b) { return a->*other < b->*other; });
  return transfers;
}

void add_bytes(std::vector<SlotBook::PeerSize>& peers, int64_t peer, int64_t bytes) {
  if (peers.empty() || peers.back().peer != peer) peers.push_back({peer, 0});
  peers.back().bytes += bytes;
}

}  // namespace

SlotBook::SlotBook(const RankPlan& part, const std::vector<Step>& steps, Exchange exchange)
    : part_(part), exchange_(exchange) {
  for (const Step& step : steps) {
    note_uses(step.before);
    for (int64_t index = 0; step.computes && index < kNumPayloads; ++index) {
      const auto payload = static_cast<Payload>(index);
      const bool of_kv = is_of_kv(payload);
      const int64_t slot = is_gradient(payload) ? (of_kv ? step.dkv : step.dq).slot : (of_kv ? step.kv : step.q).slot;
      note_use(payload, slot, {step.step});
    }
    note_uses(step.after);
  }
  // What arrives late counts when it arrives.
  for (auto& [slot, uses] : uses_) {
    std::stable_sort(uses.begin(), uses.end(), [](const SlotUse& a, const SlotUse& b) { return a.step < b.step; });
  }
}

void SlotBook::note_uses(const std::vector<Transfer>& transfers) {
  for (const Transfer& t : transfers) {
    if (t.src == part_.rank) note_use(t.payload, t.from.slot, {t.step});
  }
  for (const Transfer& t : transfers) {
    if (t.dst != part_.rank) continue;
    const bool replaces = replaces_slot(t, part_.problem);
    note_use(t.payload, t.to.slot, {t.step, replaces});
    if (!replaces) note_use(t.payload, t.to.slot, {t.needed_by});
  }
}

void SlotBook::note_use(Payload payload, int64_t slot, const SlotUse& use) {
  if (slot != kOwnSlot && slot != kNoSlot) uses_[{payload, slot}].push_back(use);
}

// Whether nothing needs what lies there from step `step` on, before other content replaces it.
bool SlotBook::is_done(const Slot& slot, int64_t step) const {
  const auto found = uses_.find(slot);
  if (found == uses_.end()) return true;
  const auto next = std::partition_point(found->second.begin(), found->second.end(),
                                         [&](const SlotUse& use) { return use.step < step; });
  return next == found->second.end() || next->replaces;
}

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
  // Nothing reads any more what lay there; the memory may be used again.
  for (const Transfer* t : post.transfers) {
    if (t->dst == part_.rank && replaces_slot(*t, part_.problem)) free_slot({t->payload, t->to.slot});
  }
  Journey& journey = journeys_.emplace_back();
  journey.needed_by = post.needed_by;
  journey.gradients = post.gradients;
  journey.post = post;
  journey.is_gathered = is_gathered(post, exchange_);
  plan_sending(journey);
  plan_receiving(journey);
  on_start(journey);
  take_pieces(journey);
}

// What goes to each rank, in the order of the ranks; the same rows once where all ranks get them.
void SlotBook::plan_sending(Journey& journey) {
  std::vector<MessagePart> parts;
  for (const Transfer* t : in_order(journey.post, &Transfer::src, &Transfer::dst, part_.rank)) {
    if (journey.is_gathered && !parts.empty() && parts.front().transfer->dst != t->dst) break;
    const int64_t bytes = bytes_of(*t, part_.problem), offset = journey.sent.bytes;
    parts.push_back({t, {kNoBlock, offset, bytes}});
    if (!journey.is_gathered) add_bytes(journey.sends, t->dst, bytes);
    journey.sent.bytes += bytes;
  }
  if (journey.is_gathered) journey.sent.bytes = gathered_bytes(journey.post, part_.problem);
  const Area ready = ready_message(journey.post);
  if (ready.block != kNoBlock) {
    journey.sent = ready;
    share(ready.block);
    return;
  }
  if (journey.sent.bytes == 0) return;
  journey.packed = std::move(parts);
  journey.sent.block = allocate(journey.sent.bytes);
  for (MessagePart& part : journey.packed) part.area.block = journey.sent.block;
  on_make(journey.sent.block, journey.sent.bytes, journey.post.transfers.front()->payload);
}

void SlotBook::plan_receiving(Journey& journey) {
  int64_t total = 0;
  for (const Transfer* t : in_order(journey.post, &Transfer::dst, &Transfer::src, part_.rank)) {
    const int64_t bytes = bytes_of(*t, part_.problem);
    if (!journey.is_gathered) add_bytes(journey.receives, t->src, bytes);
    total += bytes;
  }
  if (journey.is_gathered) total = part_.world * journey.sent.bytes;
  journey.received = {allocate(total), 0, total};
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

void SlotBook::take_pieces(Journey& journey) {
  int64_t offset = 0, src = -1;
  for (const Transfer* t : in_order(journey.post, &Transfer::dst, &Transfer::src, part_.rank)) {
    if (journey.is_gathered && t->src != src) offset = t->src * journey.sent.bytes;
    src = t->src;
    const Area area{journey.received.block, offset, bytes_of(*t, part_.problem)};
    offset += area.bytes;
    if (replaces_slot(*t, part_.problem)) {
      share(area.block);
      slots_[{t->payload, t->to.slot}] = {area, t->to.rows, t->to.head_end - t->to.head_begin};
    } else {
      journey.arrivals.push_back({t, area});
    }
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
    if (is_gradient(slot.first) == gradients && is_done(slot, step)) done.push_back(slot);
  }
  for (const Slot& slot : done) free_slot(slot);
}

DType SlotBook::element_type(Payload payload) const {
  const DType dtype = part_.problem.dtype;
  return size_of(payload, part_.problem).element_bytes == size_of(dtype) ? dtype : accumulator_of(dtype);
}

int64_t SlotBook::bytes_in(Payload payload, int64_t rows, int64_t heads) const {
  const PayloadSize size = size_of(payload, part_.problem);
  return size.batch * heads * rows * size.dim * size.element_bytes;
}

}  // namespace ringspan
