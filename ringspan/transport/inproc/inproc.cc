#include "ringspan/transport/inproc/inproc.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <unordered_map>

#include "ringspan/base/error.h"

namespace ringspan::inproc {
namespace {

struct Key {
  int64_t src, dst, tag;
  auto operator<=>(const Key&) const = default;
};

// A message between its posting and the receiver's copy.
struct Message {
  std::span<const std::byte> bytes;
  bool copied = false;
};

struct Pending {
  Key key;
  bool is_send = false;
  std::shared_ptr<Message> message;  // sends
  std::span<std::byte> target;       // receives
};

}  // namespace

class Group::Hub {
 public:
  Hub(int64_t world, Options options) : world(world), options(options) {}

  void deliver(const Key& key, std::shared_ptr<Message> message) {
    std::lock_guard lock(mutex_);
    queues_[key].push_back(std::move(message));
    changed_.notify_all();
  }

  // Copies outside the lock: the sender's memory is pinned until `copied` is set.
  void receive(const Key& key, std::span<std::byte> target) {
    std::unique_lock lock(mutex_);
    wait_until(lock, key.dst, key.src, [&] { return !queues_[key].empty(); });
    std::shared_ptr<Message> message = queues_[key].front();
    queues_[key].pop_front();
    lock.unlock();
    const bool fits = message->bytes.size() == target.size();
    if (fits && !target.empty()) std::memcpy(target.data(), message->bytes.data(), target.size());
    lock.lock();
    message->copied = true;
    changed_.notify_all();
    if (!fits) {
      throw TransportError(key.dst, key.src, -1,
                           concat("rank ", key.dst, " expected ", target.size(), " bytes from rank ", key.src, ", got ",
                                  message->bytes.size()));
    }
  }

  void wait_copied(const Key& key, const Message& message) {
    std::unique_lock lock(mutex_);
    wait_until(lock, key.src, key.dst, [&] { return message.copied; });
  }

  // A message that nobody has begun to copy is withdrawn; one that is being copied is waited for.
  void withdraw(const Key& key, const std::shared_ptr<Message>& message) {
    std::unique_lock lock(mutex_);
    std::deque<std::shared_ptr<Message>>& queue = queues_[key];
    const auto waiting = std::find(queue.begin(), queue.end(), message);
    if (waiting != queue.end()) {
      queue.erase(waiting);
      return;
    }
    changed_.wait(lock, [&] { return message->copied; });
  }

  void abandon(int64_t rank) {
    std::lock_guard lock(mutex_);
    if (lost_ < 0) lost_ = rank;
    changed_.notify_all();
  }

  const int64_t world;
  const Options options;

 private:
  template <class Ready>
  void wait_until(std::unique_lock<std::mutex>& lock, int64_t rank, int64_t peer, Ready ready) {
    const bool in_time = changed_.wait_for(lock, options.timeout, [&] { return lost_ >= 0 || ready(); });
    if (ready()) return;
    if (lost_ >= 0) throw TransportError(rank, lost_, -1, concat("rank ", rank, ": rank ", lost_, " is lost"));
    if (!in_time) {
      throw TransportError(rank, peer, -1,
                           concat("rank ", rank, " waited ", options.timeout.count(), " ms for rank ", peer));
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, std::deque<std::shared_ptr<Message>>> queues_;
  int64_t lost_ = -1;
};

class Group::Endpoint final : public Transport {
 public:
  Endpoint(std::shared_ptr<Hub> hub, int64_t rank) : hub_(std::move(hub)), rank_(rank) {}

  int64_t rank() const override { return rank_; }
  int64_t world() const override { return hub_->world; }

  Request post_send(int64_t dst, int64_t tag, std::span<const std::byte> bytes) override {
    check_peer(dst);
    auto message = std::make_shared<Message>(Message{bytes});
    hub_->deliver({rank_, dst, tag}, message);
    counters_.messages_sent += 1;
    counters_.bytes_sent += static_cast<int64_t>(bytes.size());
    return remember({{rank_, dst, tag}, true, std::move(message), {}});
  }

  Request post_recv(int64_t src, int64_t tag, std::span<std::byte> bytes) override {
    check_peer(src);
    return remember({{src, rank_, tag}, false, nullptr, bytes});
  }

  void wait(Request request) override {
    const auto entry = pending_.find(request);
    RINGSPAN_CHECK(entry != pending_.end(), "request ", request, " is not pending on rank ", rank_);
    const Pending& pending = entry->second;
    pending.is_send ? hub_->wait_copied(pending.key, *pending.message) : hub_->receive(pending.key, pending.target);
    pending_.erase(entry);
  }

  void cancel(Request request) noexcept override {
    const auto entry = pending_.find(request);
    if (entry == pending_.end()) return;
    if (entry->second.is_send) hub_->withdraw(entry->second.key, entry->second.message);
    pending_.erase(entry);
  }

  Counters counters() const override { return counters_; }

 private:
  void check_peer(int64_t peer) const {
    RINGSPAN_CHECK(peer >= 0 && peer < hub_->world, "peer ", peer, " is outside a world of ", hub_->world);
  }

  Request remember(Pending pending) {
    pending_.emplace(next_request_, std::move(pending));
    return next_request_++;
  }

  std::shared_ptr<Hub> hub_;
  const int64_t rank_;
  Counters counters_;
  Request next_request_ = 0;
  std::unordered_map<Request, Pending> pending_;
};

Group::Group(int64_t world, Options options) : hub_(std::make_shared<Hub>(world, options)) {
  RINGSPAN_CHECK(world > 0, "a group needs at least one rank, not ", world);
  for (int64_t rank = 0; rank < world; ++rank) endpoints_.push_back(std::make_unique<Endpoint>(hub_, rank));
}

Group::~Group() = default;

Transport& Group::endpoint(int64_t rank) { return *endpoints_[rank]; }

void Group::abandon(int64_t rank) { hub_->abandon(rank); }

void run_ranks(int64_t world, const std::function<void(Transport&)>& body, Options options) {
  Group group(world, options);
  std::mutex mutex;
  std::exception_ptr cause, echo;
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(group.endpoint(rank));
      } catch (const TransportError&) {
        std::lock_guard lock(mutex);
        if (!echo) echo = std::current_exception();
        group.abandon(rank);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!cause) cause = std::current_exception();
        group.abandon(rank);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (cause) std::rethrow_exception(cause);
  if (echo) std::rethrow_exception(echo);
}

}  // namespace ringspan::inproc
