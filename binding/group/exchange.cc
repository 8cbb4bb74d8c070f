#include "binding/group/exchange.h"

#include <atomic>
#include <mutex>
#include <numeric>
#include <unordered_map>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "ringspan/base/error.h"

#include "binding/base/c10d_ops.h"
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

// Modes that count collectives, such as CommDebugMode, know the functional ones by name. Only they are waited for
// without a deadline: nothing gives the work behind their result.
// So are those of a group that is written in Python.
bool is_functional(const Group& group) { return !group.backend || c10::impl::TorchDispatchModeTLS::any_modes_set(); }

// Boxed, because the type of the group argument in the schema changes between versions of PyTorch.
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

// What c10d throws becomes the loss of a peer.
template <class Action>
auto posting(LiveCall& call, int64_t peer, Action&& action) {
  try {
    return action();
  } catch (const std::exception& error) {
    call.lose(peer, message_of(error));
  }
}

int64_t sum_of(const std::vector<int64_t>& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

class AllToAll final : public FlatExchange {
 public:
  explicit AllToAll(const Group& group) : group_(group) {}

  Flight start(const Message& message, LiveCall& call) override {
    count_posted(group_.name, static_cast<int64_t>(message.send.nbytes()));
    return posting(call, -1, [&]() -> Flight {
      at::Tensor sent = message.send;
      if (is_functional(group_)) {
        return {.sent = sent,
                .received = call_functional("_c10d_functional::all_to_all_single",
                                            {sent, message.received, message.sent, group_.name}),
                .is_functional = true};
      }
      at::Tensor received = at::empty({sum_of(message.received)}, sent.options());
      auto work = post_c10d("alltoall_base_", {received, sent, group_.process_group, message.received, message.sent});
      return {.sent = sent, .received = received, .works = {{-1, std::move(work)}}};
    });
  }

 private:
  Group group_;
};

// ProcessGroupGloo corrupts its memory where an op with a longer name than this one's runs beside another
// (docs/gloo-race.md): the functional all_gather has one.
class AllGather final : public FlatExchange {
 public:
  explicit AllGather(const Group& group) : group_(group) {}

  Flight start(const Message& message, LiveCall& call) override {
    count_posted(group_.name, (group_.size - 1) * static_cast<int64_t>(message.send.nbytes()));
    return posting(call, -1, [&]() -> Flight {
      at::Tensor sent = message.send;
      if (is_functional(group_)) {
        return {
            .sent = sent,
            .received = call_functional("_c10d_functional::all_gather_into_tensor", {sent, group_.size, group_.name}),
            .is_functional = true};
      }
      at::Tensor received = at::empty({group_.size * sent.numel()}, sent.options());
      auto work = post_c10d("_allgather_base_", {received, sent, group_.process_group});
      return {.sent = sent, .received = received, .works = {{-1, std::move(work)}}};
    });
  }

 private:
  Group group_;
};

// Both sides know each other's sizes, so an empty message is not sent at all. Tags hold the number of the call, so that
// nothing is received in another one.
class P2p final : public FlatExchange {
 public:
  explicit P2p(const Group& group) : group_(group) {
    if (!group_.backend)
      throw Unsupported("exchange \"p2p\" needs a group with a backend such as gloo; use all_to_all");
  }

  Flight start(const Message& message, LiveCall& call) override {
    Flight flight{.sent = message.send, .received = at::empty({sum_of(message.received)}, message.send.options())};
    const int tag = tag_in(call.number(), message.tag);
    // NCCL and HCCL run what one pair of ranks posts one after the other: two ranks that both receive first would wait
    // for each other for ever, unless their sends and receives are one group.
    const bool coalesces = group_.backend->supportsCoalescing();
    int64_t last = -1;
    if (coalesces) group_.backend->startCoalescing();
    for_each_piece(flight.received, message.received, [&](int64_t peer, std::vector<at::Tensor> piece) {
      last = peer;
      flight.works.emplace_back(
          peer, posting(call, peer, [&] { return group_.backend->recv(piece, static_cast<int>(peer), tag); }));
    });
    for_each_piece(flight.sent, message.sent, [&](int64_t peer, std::vector<at::Tensor> piece) {
      last = peer;
      flight.works.emplace_back(
          peer, posting(call, peer, [&] { return group_.backend->send(piece, static_cast<int>(peer), tag); }));
      count_posted(group_.name, static_cast<int64_t>(piece[0].nbytes()));
    });
    if (!coalesces) return flight;
    // Nothing for a group in which nothing was posted.
    if (auto work = posting(call, last, [&] { return group_.backend->endCoalescing(); })) {
      flight.works.clear();
      flight.works.emplace_back(last, std::move(work));
    }
    return flight;
  }

 private:
  // Tags of a message stay below this.
  static constexpr int64_t kMessageTags = int64_t{1} << 20, kCalls = int64_t{1} << 10;
  static int tag_in(int64_t number, int64_t tag) {
    return static_cast<int>((number % kCalls) * kMessageTags + tag % kMessageTags);
  }

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

void finish(Flight& flight, LiveCall& call) {
  if (flight.is_functional) wait_functional(flight.received);
  while (!flight.works.empty()) {
    // Stays in the flight until it is finished, so that it can be kept.
    const auto [peer, work] = flight.works.back();
    call.finish(work, peer);
    flight.works.pop_back();
  }
}

Traffic traffic_of(const std::string& group_name) {
  const std::lock_guard lock(counts().mutex);
  const auto found = counts().by_group.find(group_name);
  return found == counts().by_group.end() ? Traffic{} : found->second;
}

void set_wait_at_post(bool waits) { wait_at_post = waits; }
bool waits_at_post() { return wait_at_post; }

}  // namespace ringspan::binding
