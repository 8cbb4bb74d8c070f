#include "binding/exchange.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "binding/errors.h"
#include "binding/traffic.h"

namespace ringspan::binding {
namespace {

std::atomic<bool> waits_at_post{false};

// Boxed, because the type of the group argument in the schema changes between versions of PyTorch. Through the
// dispatcher, because modes that count collectives listen there.
at::Tensor call_functional(const char* name, torch::jit::Stack stack) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  op.callBoxed(stack);
  return std::move(stack[0]).toTensor();
}

void wait_functional(const at::Tensor& tensor) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  op.call(tensor);
}

class AllToAll final : public FlatExchange {
 public:
  explicit AllToAll(const Group& group) : group_(group) {}

  Flight start(const Message& message) override {
    std::vector<int64_t> sent(group_.size, 0), received(group_.size, 0);
    sent[message.dst] = message.send.numel();
    received[message.src] = message.num_received;
    at::Tensor result =
        call_functional("_c10d_functional::all_to_all_single", {message.send, received, sent, group_.name});
    count_posted(group_.name, static_cast<int64_t>(message.send.nbytes()));
    return {message.send, std::move(result), {}};
  }

  void finish(Flight& flight) override { wait_functional(flight.received); }
  const char* collective() const override { return "all_to_all"; }

 private:
  Group group_;
};

// Both sides know each other's sizes, so an empty message is not sent at all.
class P2p final : public FlatExchange {
 public:
  explicit P2p(const Group& group) : group_name_(group.name), backend_(group.backend) {
    if (!backend_) throw Unsupported("exchange \"p2p\" needs a group with a backend such as gloo; use all_to_all");
  }

  Flight start(const Message& message) override {
    Flight flight{message.send, at::empty({message.num_received}, message.send.options()), {}};
    const auto tag = static_cast<int>(message.tag);
    if (flight.received.numel() > 0) {
      std::vector<at::Tensor> tensors = {flight.received};
      flight.works.push_back(backend_->recv(tensors, static_cast<int>(message.src), tag));
    }
    if (flight.sent.numel() > 0) {
      std::vector<at::Tensor> tensors = {flight.sent};
      flight.works.push_back(backend_->send(tensors, static_cast<int>(message.dst), tag));
      count_posted(group_name_, static_cast<int64_t>(flight.sent.nbytes()));
    }
    return flight;
  }

  void finish(Flight& flight) override {
    while (!flight.works.empty()) {
      const auto work = std::move(flight.works.back());
      flight.works.pop_back();
      work->wait();
    }
  }
  const char* collective() const override { return ""; }

 private:
  std::string group_name_;
  c10::intrusive_ptr<c10d::Backend> backend_;
};

const Transfer& find_transfer(std::span<const Transfer> transfers, int64_t Transfer::* end, int64_t rank) {
  const auto found =
      std::find_if(transfers.begin(), transfers.end(), [&](const Transfer& transfer) { return transfer.*end == rank; });
  RINGSPAN_CHECK(found != transfers.end(), "plan: rank ", rank, " has no part in the transfers of a step");
  return *found;
}

// Runs a c10d action; what it throws becomes the loss of a peer.
template <class Action>
void guard_peer(const RankPlan& part, const Transfer& received, const char* collective, Action&& action) {
  try {
    action();
  } catch (const std::exception& error) {
    const char* what = is_kv_gradient(received) ? "dk and dv" : "k and v";
    const std::string doubt =
        *collective ? concat(" or another rank, for an ", collective, " fails as a whole,") : std::string();
    throw_peer_error(concat("rank ", part.rank, " lost peer ", received.src, doubt, " in step ", received.step,
                            " (transfer: ", what, " of rank ", received.owner, " from rank ", received.src, " to rank ",
                            received.dst, "): ", message_of(error), ". Make a new process group before the next call"));
  }
}

int64_t pair_elements(const RankPlan& part, int64_t owner) {
  const Problem& p = part.problem;
  return p.batch * p.kv_heads * part.kv_rows[owner] * (p.qk_dim + p.v_dim);
}

// K-like first, then V-like, each dense.
Pair split_flat(const at::Tensor& flat, const RankPlan& part, int64_t owner) {
  const Problem& p = part.problem;
  const int64_t rows = part.kv_rows[owner], num_k = p.batch * p.kv_heads * rows * p.qk_dim;
  return {flat.narrow(0, 0, num_k).view({p.batch, p.kv_heads, rows, p.qk_dim}),
          flat.narrow(0, num_k, pair_elements(part, owner) - num_k).view({p.batch, p.kv_heads, rows, p.v_dim})};
}

// The pair in one flat tensor of `size` elements or what it needs.
at::Tensor pack(const Pair& pair, const RankPlan& part, int64_t owner, int64_t size) {
  at::Tensor flat = at::empty({size}, pair.k.options());
  const Pair parts = split_flat(flat, part, owner);
  parts.k.copy_(pair.k);
  parts.v.copy_(pair.v);
  const int64_t used = pair_elements(part, owner);
  if (size > used) flat.narrow(0, used, size - used).zero_();
  return flat;
}

}  // namespace

std::unique_ptr<FlatExchange> make_all_to_all(const Group& group) { return std::make_unique<AllToAll>(group); }
std::unique_ptr<FlatExchange> make_p2p(const Group& group) { return std::make_unique<P2p>(group); }

void set_wait_at_post(bool waits) { waits_at_post = waits; }

SlotRing::SlotRing(const RankPlan& part, std::unique_ptr<FlatExchange> exchange, at::ScalarType dtype, Pair own)
    : part_(part), exchange_(std::move(exchange)), dtype_(dtype), own_(std::move(own)) {}

SlotRing::~SlotRing() {
  // After a failure: what still travels may write into our buffers until it is waited for.
  for (auto& [step, flight] : flights_) {
    try {
      exchange_->finish(flight);
    } catch (const std::exception&) {
      // The first failure is the one that is reported.
    }
  }
}

Pair SlotRing::slot(int64_t slot, int64_t owner) {
  if (slot == kOwnSlot) return own_;
  at::Tensor& flat = slots_[slot];
  if (!flat.defined()) flat = at::empty({pair_elements(part_, owner)}, own_.k.options().dtype(dtype_));
  return split_flat(flat, part_, owner);
}

void SlotRing::post(std::span<const Transfer> transfers) {
  if (transfers.empty()) return;
  const Transfer& sent = find_transfer(transfers, &Transfer::src, part_.rank);
  const Transfer& received = find_transfer(transfers, &Transfer::dst, part_.rank);
  Message message;
  message.send = sent.src_slot == kOwnSlot ? pack(own_, part_, sent.owner, pair_elements(part_, sent.owner))
                                           : slots_.at(sent.src_slot);
  message.dst = sent.dst;
  message.src = received.src;
  message.num_received = pair_elements(part_, received.owner);
  message.tag = 2 * sent.step + (is_kv_gradient(sent) ? 1 : 0);
  Flight flight;
  guard_peer(part_, received, exchange_->collective(), [&] {
    flight = exchange_->start(message);
    if (waits_at_post) exchange_->finish(flight);
  });
  slots_[received.dst_slot] = flight.received;
  flights_.emplace(sent.step, std::move(flight));
}

void SlotRing::wait(std::span<const Transfer> transfers) {
  if (transfers.empty()) return;
  const Transfer& sent = find_transfer(transfers, &Transfer::src, part_.rank);
  const Transfer& received = find_transfer(transfers, &Transfer::dst, part_.rank);
  auto flight = flights_.extract(sent.step);
  RINGSPAN_CHECK(!flight.empty(), "plan: the transfers of step ", sent.step, " were never posted");
  try {
    guard_peer(part_, received, exchange_->collective(), [&] { exchange_->finish(flight.mapped()); });
  } catch (...) {
    flights_.insert(std::move(flight));
    throw;
  }
  // Nobody reads what has been sent on; the next one to arrive takes its memory.
  if (sent.src_slot != kOwnSlot) slots_.erase(sent.src_slot);
}

GatheredKv::GatheredKv(const RankPlan& part, Group group, Pair own)
    : part_(part), group_(std::move(group)), own_(std::move(own)) {
  for (int64_t owner = 0; owner < part_.world; ++owner) padded_ = std::max(padded_, pair_elements(part_, owner));
}

GatheredKv::~GatheredKv() {
  if (arrived_) return;
  try {
    wait_functional(gathered_);
  } catch (const std::exception&) {
    // The first failure is the one that is reported.
  }
}

Pair GatheredKv::slot(int64_t slot, int64_t owner) {
  if (slot == kOwnSlot) return own_;
  return split_flat(gathered_.narrow(0, owner * padded_, padded_), part_, owner);
}

void GatheredKv::post(std::span<const Transfer> transfers) {
  if (transfers.empty() || gathered_.defined()) return;
  const Transfer& received = find_transfer(transfers, &Transfer::dst, part_.rank);
  guard_peer(part_, received, "all_gather", [&] {
    const at::Tensor packed = pack(own_, part_, part_.rank, padded_);
    gathered_ = call_functional("_c10d_functional::all_gather_into_tensor", {packed, group_.size, group_.name});
    count_posted(group_.name, (group_.size - 1) * static_cast<int64_t>(packed.nbytes()));
    if (waits_at_post) wait_functional(gathered_);
  });
  arrived_ = false;
}

void GatheredKv::wait(std::span<const Transfer> transfers) {
  if (arrived_) return;
  arrived_ = true;
  guard_peer(part_, find_transfer(transfers, &Transfer::dst, part_.rank), "all_gather",
             [&] { wait_functional(gathered_); });
}

}  // namespace ringspan::binding
