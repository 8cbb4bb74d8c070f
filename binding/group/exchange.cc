#include "binding/group/exchange.h"

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "ringspan/base/error.h"

#include "binding/base/errors.h"

namespace ringspan::binding {
namespace {

std::atomic<bool> wait_at_post{false};

struct Counts {
  std::mutex mutex;
  std::unordered_map<std::string, Traffic> by_group;
};

// Never destroyed: a call may still run while static objects go.
Counts& counts() {
  static auto& counts = *new Counts;
  return counts;
}

void count_posted(const std::string& group_name, int64_t bytes) {
  const std::lock_guard lock(counts().mutex);
  Traffic& traffic = counts().by_group[group_name];
  traffic.messages += 1;
  traffic.bytes += bytes;
}

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

  Flight start(const Message& message, int64_t&) override {
    at::Tensor result = call_functional("_c10d_functional::all_to_all_single",
                                        {message.send, message.received, message.sent, group_.name});
    count_posted(group_.name, static_cast<int64_t>(message.send.nbytes()));
    return {message.send, std::move(result)};
  }

  void finish(Flight& flight, int64_t&) override { wait_functional(flight.received); }
  const char* collective() const override { return "all_to_all"; }

 private:
  Group group_;
};

class AllGather final : public FlatExchange {
 public:
  explicit AllGather(const Group& group) : group_(group) {}

  Flight start(const Message& message, int64_t&) override {
    at::Tensor result =
        call_functional("_c10d_functional::all_gather_into_tensor", {message.send, group_.size, group_.name});
    count_posted(group_.name, (group_.size - 1) * static_cast<int64_t>(message.send.nbytes()));
    return {message.send, std::move(result)};
  }

  void finish(Flight& flight, int64_t&) override { wait_functional(flight.received); }
  const char* collective() const override { return "all_gather"; }

 private:
  Group group_;
};

// Both sides know each other's sizes, so an empty message is not sent at all.
class P2p final : public FlatExchange {
 public:
  explicit P2p(const Group& group) : group_(group) {
    if (!group_.backend)
      throw Unsupported("exchange \"p2p\" needs a group with a backend such as gloo; use all_to_all");
  }

  Flight start(const Message& message, int64_t& lost) override {
    int64_t num_received = 0;
    for (const int64_t count : message.received) num_received += count;
    Flight flight{message.send, at::empty({num_received}, message.send.options())};
    const auto tag = static_cast<int>(message.tag);
    // NCCL and HCCL run what one pair of ranks posts one after the other: two ranks that both receive first would wait
    // for each other for ever, unless their sends and receives are one group.
    const bool coalesces = group_.backend->supportsCoalescing();
    if (coalesces) group_.backend->startCoalescing();
    for_each_piece(flight.received, message.received, [&](int64_t peer, std::vector<at::Tensor> piece) {
      lost = peer;
      flight.works.emplace_back(peer, group_.backend->recv(piece, static_cast<int>(peer), tag));
    });
    for_each_piece(flight.sent, message.sent, [&](int64_t peer, std::vector<at::Tensor> piece) {
      lost = peer;
      flight.works.emplace_back(peer, group_.backend->send(piece, static_cast<int>(peer), tag));
      count_posted(group_.name, static_cast<int64_t>(piece[0].nbytes()));
    });
    if (!coalesces) return flight;
    // Nothing for a group in which nothing was posted.
    if (auto work = group_.backend->endCoalescing()) {
      flight.works.clear();
      flight.works.emplace_back(lost, std::move(work));
    }
    return flight;
  }

  void finish(Flight& flight, int64_t& lost) override {
    while (!flight.works.empty()) {
      const auto [peer, work] = std::move(flight.works.back());
      flight.works.pop_back();
      lost = peer;
      work->wait();
    }
  }
  const char* collective() const override { return ""; }

 private:
  template <class Action>
  static void for_each_piece(const at::Tensor& flat, const std::vector<int64_t>& counts, Action&& action) {
    int64_t begin = 0;
    for (size_t peer = 0; peer < counts.size(); ++peer) {
      if (counts[peer] > 0) action(static_cast<int64_t>(peer), {flat.narrow(0, begin, counts[peer])});
      begin += counts[peer];
    }
  }

  Group group_;
};

}  // namespace

std::unique_ptr<FlatExchange> make_all_to_all(const Group& group) { return std::make_unique<AllToAll>(group); }
std::unique_ptr<FlatExchange> make_p2p(const Group& group) { return std::make_unique<P2p>(group); }

std::unique_ptr<FlatExchange> make_all_gather(const Group& group) { return std::make_unique<AllGather>(group); }

Traffic traffic_of(const std::string& group_name) {
  const std::lock_guard lock(counts().mutex);
  const auto found = counts().by_group.find(group_name);
  return found == counts().by_group.end() ? Traffic{} : found->second;
}

void set_wait_at_post(bool waits) { wait_at_post = waits; }
bool waits_at_post() { return wait_at_post; }

}  // namespace ringspan::binding
