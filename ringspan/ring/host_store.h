// HostStore: slots in plain memory, by the rule of plan/slot_book.h, and messages over a Transport, one for each post
// and rank. An empty one is not sent: both sides know its size.
#pragma once

#include <map>
#include <vector>

#include "ringspan/plan/slot_book.h"
#include "ringspan/ring/buffer.h"
#include "ringspan/ring/store.h"
#include "ringspan/transport/transport.h"

namespace ringspan {

class HostStore final : public Store, private SlotBook {
 public:
  // `part`, `steps` (the pass of it that runs) and `transport` live as long as this.
  HostStore(const RankPlan& part, const std::vector<Step>& steps, Transport& transport)
      : SlotBook(part, steps, Exchange::kP2p), transport_(transport) {}
  ~HostStore() override;

  void bind(Payload payload, const TensorView& tensor) override;
  TensorView view(Payload payload, const Operand& operand) override;
  void post(std::span<const Transfer> transfers) override { SlotBook::post(transfers); }
  void wait(int64_t step, bool gradients) override { SlotBook::wait(step, gradients); }
  bool awaits(int64_t step, bool gradients) const override { return SlotBook::awaits(step, gradients); }

 private:
  // A message on its way, and the transfer that names it.
  struct PostedMessage {
    const Journey* journey = nullptr;
    Transport::Request request = 0;
    const Transfer* named = nullptr;
    bool arrives = false;
  };

  void on_make(Block block, int64_t bytes, Payload) override { memory_[block] = Buffer(bytes); }
  void on_free(Block block) override { memory_.erase(block); }
  void on_start(const Journey& journey) override;
  void on_finish(const std::vector<const Journey*>& journeys) override;
  void on_arrival(const MessagePart& piece) override;

  void post_messages(const Journey& journey, bool arrives);
  void finish(const PostedMessage& message);
  DType dtype_of(Payload payload) const;
  std::byte* at(const Area& area) const { return memory_.at(area.block).data() + area.offset; }
  // The tensor of slot `number`.
  TensorView tensor_in(Payload payload, int64_t number, int64_t rows, const HeadRange& heads);
  // The tensor that holds the transfer's rows at one end, of its batch entries and heads.
  TensorView tensor_at(const Transfer& transfer, const BufferPlace& place);
  TensorView message_at(const Transfer& transfer, std::byte* data) const;

  Transport& transport_;
  std::map<Payload, TensorView> own_;
  std::map<Block, Buffer> memory_;
  std::vector<PostedMessage> messages_;  // in the order of posting
};

}  // namespace ringspan
