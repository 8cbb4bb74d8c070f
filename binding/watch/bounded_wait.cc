#include "binding/watch/bounded_wait.h"

#include <chrono>
#include <exception>
#include <optional>
#include <utility>

#include "ringspan/base/error.h"

namespace ringspan::binding {
namespace {

using namespace std::chrono_literals;

bool is_receive_or_send(const c10d::Work& work) { return c10d::isP2POp(work.retrieveOpType()); }

// Whether it is finished. A wait for a collective that expires can be repeated.
bool is_finished_in(c10d::Work& work, std::chrono::milliseconds time) {
  try {
    return work.wait(time);
  } catch (const std::exception&) {
    if (!work.isCompleted()) return false;
    if (const auto failure = work.exception()) std::rethrow_exception(failure);
    return true;
  }
}

// gloo closes the connections where a wait for a receive expires, so it must not; the watch calls it off instead.
class ReceiveWait {
 public:
  ReceiveWait(Watch& watch, const c10::intrusive_ptr<c10d::Work>& work) : watch_(watch) { watch_.set_receive(work); }
  ~ReceiveWait() { watch_.set_receive(nullptr); }
  ReceiveWait(const ReceiveWait&) = delete;
  ReceiveWait& operator=(const ReceiveWait&) = delete;

 private:
  Watch& watch_;
};

bool is_over_now(Patience& patience) {
  try {
    return patience.is_over();
  } catch (...) {
    throw WaitInterrupted{std::current_exception()};
  }
}

// Where even the watch is stuck, so that nobody calls the wait off, it ends by the deadline: the group is closed then
// in any case.
bool is_finished_by_deadline(c10d::Work& work, Patience& patience) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    return work.wait(patience.deadline());
  } catch (const std::exception&) {
    if (std::chrono::steady_clock::now() - begin < patience.deadline()) throw;
    throw WaitEnded(Failure{});
  }
}

void look_around(Watch& watch, Patience& patience) {
  const bool is_over = is_over_now(patience);
  if (const auto failure = watch.failure()) throw WaitEnded(*failure);
  if (!is_over) return;
  const std::vector<int64_t> last = watch.last_ranks();
  throw WaitEnded({last.size() == 1 ? last.front() : -1, ""});
}

}  // namespace

void finish(const Group& group, const c10::intrusive_ptr<c10d::Work>& work, Watch& watch, Patience& patience) {
  if (group.backend_name != "gloo") {
    work->wait();
    return;
  }
  std::optional<Watch::Attention> attention;
  if (!is_receive_or_send(*work)) {
    while (!is_finished_in(*work, kLook)) {
      if (!attention) attention.emplace(watch);
      look_around(watch, patience);
    }
    return;
  }
  const ReceiveWait called_off(watch, work);
  while (!is_finished_by_deadline(*work, patience)) {
    if (!attention) attention.emplace(watch);
    look_around(watch, patience);
  }
}

}  // namespace ringspan::binding
