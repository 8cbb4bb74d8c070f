// HostBackend: runs a rank's plan on views, with our kernels and a Transport.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <vector>

#include "ringspan/ring/local_attention.h"
#include "ringspan/transport/transport.h"

namespace ringspan {

// The K/V-sized buffers of a call and the messages in flight over them. A slot holds what one owner's shard gives:
// first the K-like tensor, then the V-like one, each dense [batch, kv_heads, rows, dim].
class SlotExchange {
 public:
  struct Pair {
    TensorView k, v;
  };

  // `dtype` of the slots; `own` is what slot kOwnSlot stands for (the caller's memory).
  SlotExchange(const RankPlan& part, Transport& transport, DType dtype, Pair own);
  ~SlotExchange();
  SlotExchange(const SlotExchange&) = delete;
  SlotExchange& operator=(const SlotExchange&) = delete;

  Pair slot(int64_t slot, int64_t owner);
  void post(std::span<const Transfer> transfers);
  void wait(std::span<const Transfer> transfers);

 private:
  // A posted transfer; `staging` where its rows do not lie in one piece.
  struct Flight {
    Transport::Request request;
    std::optional<Buffer> staging;
  };
  using FlightKey = std::array<int64_t, 4>;  // step, payload, src, dst

  TensorView view_of_transfer(const Transfer& transfer, int64_t slot);
  void complete(const Transfer& transfer);
  static FlightKey key_of(const Transfer& transfer);

  const RankPlan& part_;
  Transport& transport_;
  DType dtype_;
  Pair own_;
  std::map<int64_t, Buffer> slots_;
  std::map<FlightKey, Flight> flights_;
};

class HostForward {
 public:
  HostForward(const RankPlan& part, Transport& transport, const ConstTensorView& q, const ConstTensorView& k,
              const ConstTensorView& v, const OutputView& output, const Extras& extras, const Parallel& parallel);

  void post(std::span<const Transfer> transfers) { kv_.post(transfers); }
  void wait(std::span<const Transfer> transfers) { kv_.wait(transfers); }
  void attend(const Step& step, bool begins, bool finishes);

 private:
  SlotExchange kv_;
  LocalForward local_;
};

class HostBackward {
 public:
  HostBackward(const RankPlan& part, Transport& transport, const ConstTensorView& q, const ConstTensorView& k,
               const ConstTensorView& v, const OutputView& output, const ConstTensorView& dout,
               const ConstTensorView& dlse, const GradsView& grads, const Extras& extras, const Parallel& parallel);

  void post(std::span<const Transfer> transfers);
  void wait(std::span<const Transfer> transfers);
  void attend_backward(const Step& step, const std::function<void()>& arrived);
  void finish(const Step& last);

 private:
  const RankPlan& part_;
  GradsView grads_;
  std::array<Buffer, 2> home_;  // dk, dv at home where the caller's are not in the accumulator type
  SlotExchange kv_, dkv_;
  LocalBackward local_;
};

}  // namespace ringspan
