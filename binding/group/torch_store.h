// TorchStore: the plan's slots in tensors, by the rule of plan/slot_book.h, and its messages over c10d. What a step
// sends to a rank is one flat piece of a message.
//
// Every failure of c10d leaves as DistBackendError naming rank, peer, step and transfer (live_call.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ringspan/plan/slot_book.h"
#include "ringspan/ring/store.h"

#include "binding/group/exchange.h"
#include "binding/group/live_call.h"

namespace ringspan::binding {

class TorchStore final : public Store, private SlotBook {
 public:
  // `call` and `part` live as long as this. `steps`: the pass that runs; `like`: a tensor on the device of the call.
  TorchStore(LiveCall& call, const Group& group, Exchange exchange, const RankPlan& part,
             const std::vector<Step>& steps, const at::Tensor& like);
  ~TorchStore() override;

  void bind(Payload payload, const TensorView& tensor) override;
  void bind(Payload payload, at::Tensor tensor);

  TensorView view(Payload payload, const Operand& operand) override;
  // The same as a tensor [batch, heads, rows, dim].
  at::Tensor tensor(Payload payload, const Operand& operand);

  void post(std::span<const Transfer> transfers) override { SlotBook::post(transfers); }
  void wait(int64_t step, bool gradients) override { SlotBook::wait(step, gradients); }
  bool awaits(int64_t step, bool gradients) const override { return SlotBook::awaits(step, gradients); }

 private:
  void on_make(Block block, int64_t bytes, Payload payload) override;
  void on_free(Block block) override { memory_.erase(block); }
  void on_start(const Journey& journey) override;
  void on_finish(const std::vector<const Journey*>& journeys) override;
  void on_arrival(const MessagePart& piece) override;

  at::ScalarType dtype_of(Payload payload) const;
  at::Tensor own(Payload payload);
  // Of a dense tensor in a block.
  at::Tensor tensor_in(const Area& area, const std::vector<int64_t>& shape) const;
  at::Tensor flat_in(const Area& area, at::ScalarType dtype) const;
  // The tensor of slot `number`.
  at::Tensor tensor_of(Payload payload, int64_t number, int64_t rows, const HeadRange& heads);
  at::Tensor tensor_at(const Transfer& transfer, const BufferPlace& place);
  FlatExchange& way_of(const Journey& journey) const { return journey.is_gathered ? *all_gather_ : *exchange_; }
  void reach(const Journey& journey, bool waits);

  LiveCall& call_;
  at::TensorOptions options_;
  std::unique_ptr<FlatExchange> exchange_, all_gather_;
  std::map<Payload, TensorView> own_views_;
  std::map<Payload, at::Tensor> own_;
  std::map<Block, at::Tensor> memory_;  // flat
  std::map<const Journey*, Flight> flights_;
};

}  // namespace ringspan::binding
