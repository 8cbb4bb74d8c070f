// SlotBook: the one rule by which a rank keeps the slots of a plan in memory while it runs a pass. Plain integers: the
// stores of the core and of the binding, which hold the memory, derive from it and do what its hooks say; by itself it
// counts bytes.
//
//   post   What goes to others leaves in one message for each post. Whole slots that go to one rank and lie one behind
//          the other, as they came in one message, are that message; all else is packed. What comes has one block, in
//          the order of the ranks; rows that fill a slot are the slot as they lie there.
//   wait   Other rows move from the message to their place, or are added there, in the order of the plan.
//   free   A block is free when no message needs it and the plan is done with all slots in it.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "ringspan/plan/exchange.h"
#include "ringspan/plan/plan.h"

namespace ringspan {

class SlotBook {
 public:
  using Block = int64_t;
  static constexpr Block kNoBlock = -1;

  // Bytes of a block.
  struct Area {
    Block block = kNoBlock;
    int64_t offset = 0, bytes = 0;
  };
  // A transfer's rows in a message: dense [batch, heads, rows, dim].
  struct MessagePart {
    const Transfer* transfer = nullptr;
    Area area{};  // kNoBlock: both ends are slots here
  };
  // What goes to a rank, or comes from it, in one message.
  struct PeerSize {
    int64_t peer = 0, bytes = 0;
  };
  // A post on its way, or copies from slot to slot.
  struct Journey {
    int64_t needed_by = 0;
    bool gradients = false;
    Post post{};
    bool is_gathered = false;                   // by all_gather: what is sent goes to every rank
    Area sent{};                                // kNoBlock: nothing
    std::vector<MessagePart> packed{};          // must be copied to `sent`, which is new then; none: all lies there
    std::vector<PeerSize> sends{}, receives{};  // in the order of the ranks, as they lie; none where gathered
    Area received{};                            // new
    std::vector<MessagePart> arrivals{};        // to be copied or added when all has come

    bool is_sent() const { return !post.transfers.empty(); }
    bool is_due(int64_t step, bool of_gradients) const { return needed_by <= step && gradients == of_gradients; }
  };

  // `part` and `steps`, a pass of it, live as long as this.
  SlotBook(const RankPlan& part, const std::vector<Step>& steps, Exchange exchange);
  virtual ~SlotBook() = default;
  SlotBook(const SlotBook&) = delete;
  SlotBook& operator=(const SlotBook&) = delete;

  void post(std::span<const Transfer> transfers);
  void wait(int64_t step, bool gradients);
  bool awaits(int64_t step, bool gradients) const;

  // Where a buffer of these rows and heads lies; made where the slot does not hold one. dk and dv, which travel
  // together, are made in one block.
  Area slot(Payload payload, int64_t slot, int64_t rows, const HeadRange& heads);

  // Memory that lives until the end of the pass.
  void keep(int64_t bytes) { allocate(bytes); }
  int64_t most_bytes() const { return most_; }

 protected:
  // Memory for a slot or for what is packed; the payload is one of those that will lie there.
  virtual void on_make(Block, int64_t /*bytes*/, Payload) {}
  virtual void on_free(Block) {}
  // Packs, sends, and makes the memory of `received`.
  virtual void on_start(const Journey&) {}
  // Until all of them have come and left.
  virtual void on_finish(const std::vector<const Journey*>&) {}
  // Copies or adds what has arrived to its place.
  virtual void on_arrival(const MessagePart&) {}

  // Of the elements of every payload but the bias and the mask, which have their own.
  DType element_type(Payload payload) const;
  const std::list<Journey>& journeys() const { return journeys_; }  // in the order of posting

  const RankPlan& part_;

 private:
  struct SlotEntry {
    Area area{};
    int64_t rows = 0, heads = 0;
  };
  struct BlockUse {
    int64_t bytes = 0, users = 0;
  };
  // The plan reads, sends or adds to what lies in a slot, or puts other content in its place.
  struct SlotUse {
    int64_t step = 0;
    bool replaces = false;
  };
  using Slot = std::pair<Payload, int64_t>;

  void note_uses(const std::vector<Transfer>& transfers);
  void note_use(Payload payload, int64_t slot, const SlotUse& use);
  bool is_done(const Slot& slot, int64_t step) const;
  void post_message(const Post& post);
  Area ready_message(const Post& post) const;
  void plan_sending(Journey& journey);
  void plan_receiving(Journey& journey);
  void take_pieces(Journey& journey);

  Block allocate(int64_t bytes);
  void share(Block block) { ++blocks_.at(block).users; }
  void release(Block block);
  void free_slot(const Slot& slot);
  void free_done_slots(int64_t step, bool gradients);
  int64_t bytes_in(Payload payload, int64_t rows, int64_t heads) const;

  const Exchange exchange_;
  std::map<Slot, std::vector<SlotUse>> uses_;  // of the pass, in the order in which they happen
  std::map<Slot, SlotEntry> slots_;
  std::map<Block, BlockUse> blocks_;
  Block next_block_ = 0;
  int64_t live_ = 0, most_ = 0;
  std::list<Journey> journeys_;
};

}  // namespace ringspan
