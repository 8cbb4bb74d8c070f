// LiveCall: a call that the ranks have agreed on, until its last message has come. Whatever goes wrong in between is
// told to the peers, and closes the group: nobody can know what of it is still on its way.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "binding/base/errors.h"
#include "binding/group/agreement.h"

namespace ringspan::binding {

class LiveCall {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  // Of a rank without peers: nothing is told to anybody.
  explicit LiveCall(Group group) : group_(std::move(group)) {}
  // `entry`: of the flight record. `lock` keeps other calls of the group waiting.
  LiveCall(std::shared_ptr<Agreement> agreement, Group group, int64_t number, int64_t entry,
           std::unique_lock<std::timed_mutex> lock);
  ~LiveCall();
  LiveCall(const LiveCall&) = delete;
  LiveCall& operator=(const LiveCall&) = delete;

  // 0 where nothing was agreed on.
  int64_t number() const { return number_; }

  // A place of the exchange: something is to be posted, or waited for.
  void reach(const Reached& reached);
  // Until the work is finished. `peer`: with whom, -1: with all ranks. DistBackendError naming the rank that failed
  // first, step and transfer.
  void finish(const Work& work, int64_t peer);
  // What c10d threw when something was posted.
  [[noreturn]] void lose(int64_t peer, const std::string& message);
  // Works that nobody will wait for, after a failure: gloo goes on reading and writing their tensors.
  void keep(std::vector<Work> works);

  // Runs what the ranks have agreed on. What it throws is told to the peers.
  template <class Action>
  auto run(Action&& action) {
    try {
      auto result = std::forward<Action>(action)();
      end();
      return result;
    } catch (const std::exception& error) {
      fail(message_of(error));
      throw;
    } catch (...) {
      fail("an exception of unknown type");
      throw;
    }
  }

 private:
  void end();
  void fail(const std::string& message) noexcept;
  [[noreturn]] void close_and_throw(const Failure& mine, const std::string& message);

  std::shared_ptr<Agreement> agreement_;
  Group group_;
  int64_t number_ = 0, entry_ = 0;
  Position position_;
  std::unique_lock<std::timed_mutex> lock_;
  bool is_closed_ = false;
};

}  // namespace ringspan::binding
