// The torch backend's messages: K/V and their gradients between the ranks of a group, over c10d. Written for plans that
// send whole shards to one peer and receive whole shards from one peer in a step (the ring).
//
//   FlatExchange   one flat tensor out, one in; AllToAll (one functional collective per step) or P2p (send and receive)
//   SlotRing       the plan's buffer slots over a FlatExchange
//   GatheredKv     all K/V at step 0 by one all_gather
//
// Every failure of c10d leaves as DistBackendError naming rank, peer, step and transfer.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "ringspan/plan/plan.h"

#include "binding/group.h"

namespace ringspan::binding {

// K-like and V-like tensor of one owner, [batch, kv_heads, rows, dim].
struct Pair {
  at::Tensor k, v;
};

// One message each way, flat and dense.
struct Message {
  at::Tensor send;
  int64_t dst = 0;
  int64_t src = 0;
  int64_t num_received = 0;  // elements
  int64_t tag = 0;
};

// A message on its way. `received` has its memory from the beginning and its content after finish().
struct Flight {
  at::Tensor sent, received;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
};

class FlatExchange {
 public:
  virtual ~FlatExchange() = default;
  virtual Flight start(const Message& message) = 0;
  virtual void finish(Flight& flight) = 0;
  // Name of the collective in which all ranks take part, "" where only two do: then the lost peer is known.
  virtual const char* collective() const = 0;
};

std::unique_ptr<FlatExchange> make_all_to_all(const Group& group);
// Unsupported where the group has no backend object.
std::unique_ptr<FlatExchange> make_p2p(const Group& group);

// Whether everything that is posted from now on is also waited for at once, so that nothing travels while a step
// computes. For the bench, which measures what the overlap hides; changes no bit of any result.
void set_wait_at_post(bool waits);

// Who serves the K/V (or their gradients) of a step.
class PairSource {
 public:
  virtual ~PairSource() = default;
  virtual Pair slot(int64_t slot, int64_t owner) = 0;
  virtual void post(std::span<const Transfer> transfers) = 0;
  virtual void wait(std::span<const Transfer> transfers) = 0;
};

// Holds two buffers at most beside the caller's: the one that a step works on (and sends) and the one that arrives.
class SlotRing final : public PairSource {
 public:
  // `own` stands for kOwnSlot; it is packed when it is sent. `dtype` of the other slots.
  SlotRing(const RankPlan& part, std::unique_ptr<FlatExchange> exchange, at::ScalarType dtype, Pair own);
  ~SlotRing() override;
  SlotRing(const SlotRing&) = delete;
  SlotRing& operator=(const SlotRing&) = delete;

  // Of a slot that nothing has arrived in: new memory.
  Pair slot(int64_t slot, int64_t owner) override;
  void post(std::span<const Transfer> transfers) override;
  void wait(std::span<const Transfer> transfers) override;

 private:
  const RankPlan& part_;
  std::unique_ptr<FlatExchange> exchange_;
  at::ScalarType dtype_;
  Pair own_;
  std::map<int64_t, at::Tensor> slots_;
  std::map<int64_t, Flight> flights_;  // by step
};

// Memory: the K/V of all ranks, each padded to the longest shard. Later posts and waits do nothing.
class GatheredKv final : public PairSource {
 public:
  GatheredKv(const RankPlan& part, Group group, Pair own);
  ~GatheredKv() override;
  GatheredKv(const GatheredKv&) = delete;
  GatheredKv& operator=(const GatheredKv&) = delete;

  Pair slot(int64_t slot, int64_t owner) override;
  void post(std::span<const Transfer> transfers) override;
  void wait(std::span<const Transfer> transfers) override;

 private:
  const RankPlan& part_;
  Group group_;
  Pair own_;
  int64_t padded_ = 0;  // elements of one rank
  at::Tensor gathered_;
  bool arrived_ = true;
};

}  // namespace ringspan::binding
