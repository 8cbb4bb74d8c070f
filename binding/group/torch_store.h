// TorchStore: the plan's slots in tensors, its transfers over c10d. What a step sends to a rank is one flat piece of a
// message; a piece that is all of a slot becomes the slot, others are copied into it.
//
// Every failure of c10d leaves as DistBackendError naming rank, peer, step and transfer.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ringspan/plan/exchange.h"
#include "ringspan/plan/slot_uses.h"
#include "ringspan/ring/store.h"

#include "binding/group/exchange.h"

namespace ringspan::binding {

class TorchStore final : public Store {
 public:
  // `part` lives as long as this. `steps`: the pass of it that runs; `like`: a tensor on the device of the call.
  TorchStore(const Group& group, Exchange exchange, const RankPlan& part, const std::vector<Step>& steps,
             const at::Tensor& like);
  ~TorchStore() override;
  TorchStore(const TorchStore&) = delete;
  TorchStore& operator=(const TorchStore&) = delete;

  void bind(Payload payload, const TensorView& tensor) override;
  void bind(Payload payload, at::Tensor tensor);

  TensorView view(Payload payload, const Operand& operand) override;
  // The same as a tensor [batch, heads, rows, dim].
  at::Tensor tensor(Payload payload, const Operand& operand);

  void post(std::span<const Transfer> transfers) override;
  void wait(int64_t step, bool gradients) override;
  bool awaits(int64_t step, bool gradients) const override;

 private:
  // Rows that arrive in a message, or come from another slot here.
  struct Arrival {
    const Transfer* transfer = nullptr;
    at::Tensor rows;  // [batch, heads, rows, dim]; undefined for a copy from slot to slot
  };
  struct Journey {
    int64_t needed_by = 0;
    bool gradients = false;
    const Transfer* named = nullptr;  // for messages
    Flight flight{};
    FlatExchange* way = nullptr;      // of the flight, where something was sent
    std::vector<Arrival> arrivals{};  // to be copied or added

    bool is_due(int64_t step, bool of_gradients) const { return needed_by <= step && gradients == of_gradients; }
  };
  using Slot = std::pair<Payload, int64_t>;

  at::ScalarType dtype_of(Payload payload) const;
  at::Tensor own(Payload payload);
  at::Tensor slot(Payload payload, int64_t slot, int64_t rows, const HeadRange& heads);
  at::Tensor tensor_at(const Transfer& transfer, const ringspan::Place& place);
  void place(const Arrival& arrival);
  void free_slots(int64_t step, bool gradients);

  void post_message(const Post& post);
  at::Tensor pack(const Post& post, std::vector<int64_t>& sent);
  at::Tensor pack_padded(const Post& post);
  at::Tensor ready_message(const Post& post) const;
  void take_pieces(const Post& post, Journey& journey);
  template <class Action>
  void guard_peer(const Transfer& named, const char* collective, Action&& action) const;

  const Group group_;
  const Exchange kind_;
  const RankPlan& part_;
  SlotUses uses_;
  at::TensorOptions options_;
  std::unique_ptr<FlatExchange> exchange_, all_gather_;
  std::map<Payload, TensorView> own_views_;
  std::map<Payload, at::Tensor> own_;
  std::map<Slot, at::Tensor> slots_;
  std::list<Journey> journeys_;  // in the order of posting
};

}  // namespace ringspan::binding
