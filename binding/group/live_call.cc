#include "binding/group/live_call.h"

#include <chrono>
#include <thread>

#include "binding/group/trap.h"
#include "binding/watch/bounded_wait.h"
#include "binding/watch/deadline.h"
#include "binding/watch/interpreter.h"
#include "binding/watch/patience.h"

namespace ringspan::binding {
namespace {

using namespace std::chrono_literals;

// A store answers within this time, or it is out of reach.
constexpr std::chrono::milliseconds kAnswer = 1500ms;
// A connection that failed is seen by others of the same rank within this time.
constexpr std::chrono::milliseconds kSettle = 200ms;

}  // namespace

LiveCall::LiveCall(std::shared_ptr<Agreement> agreement, Group group, int64_t number, int64_t entry,
                   std::unique_lock<std::timed_mutex> lock)
    : agreement_(std::move(agreement)),
      group_(std::move(group)),
      number_(number),
      entry_(entry),
      position_{.number = number},
      lock_(std::move(lock)) {
  agreement_->watch().move_to(position_);
}

LiveCall::~LiveCall() {
  // Where it was not run: what came in between is a failure as well.
  if (agreement_ && lock_) fail("the call was left");
}

void LiveCall::reach(const Reached& reached) {
  spring_trap();
  if (!agreement_) return;
  position_.step = reached.step;
  ++position_.count;
  agreement_->watch().move_to(position_);
  agreement_->record().reach(entry_, reached);
}

void LiveCall::finish(const Work& work, int64_t peer) {
  if (!agreement_) {
    work->wait();
    return;
  }
  Watch& watch = agreement_->watch();
  const auto describe = [&] {
    const std::vector<int64_t> last = watch.last_ranks();
    const std::string whom = peer >= 0          ? concat("rank ", peer)
                             : last.size() == 1 ? concat("rank ", last.front())
                                                : std::string("its peers");
    return concat("rank ", group_.rank, " waits for ", whom, " in call ", number_, " of group \"", group_.name, "\" (",
                  agreement_->record().reached(entry_).str(), "). ", agreement_->last_calls());
  };
  Patience patience(watch, deadline_of(group_), describe);
  try {
    position_.waits = true;
    watch.move_to(position_);
    binding::finish(group_, work, watch, patience);
    position_.waits = false;
    ++position_.count;
    watch.move_to(position_);
  } catch (const WaitEnded& ended) {
    Failure first = ended.failure();
    if (!first.words.empty()) close_and_throw(first, "");
    // By the deadline. Who is least far holds up the others.
    const std::string whom = first.rank >= 0 ? concat("rank ", first.rank)
                             : peer >= 0     ? concat("rank ", peer, " or one that it waits for")
                                             : std::string("a rank");
    if (first.rank < 0) first.rank = peer;
    first.words =
        concat(whom, " showed no sign of progress for ", static_cast<double>(patience.deadline().count()) / 1e3,
               " s while rank ", group_.rank, " waited");
    close_and_throw(first, "");
  } catch (const WaitInterrupted& interrupted) {
    std::rethrow_exception(interrupted.raised);
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const std::exception& error) {
    lose(peer, message_of(error));
  }
}

void LiveCall::lose(int64_t peer, const std::string& message) {
  if (!agreement_) throw_peer_error(concat("rank ", group_.rank, " lost rank ", peer, ": ", message));
  Watch& watch = agreement_->watch();
  const auto until = std::chrono::steady_clock::now() + kSettle;
  std::vector<int64_t> gone = watch.peers().lost();
  while (gone.empty() && !watch.failure() && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(5ms);
    gone = watch.peers().lost();
  }
  Failure mine{peer, peer >= 0 ? concat("rank ", peer, " or one that it waits for was lost") : "a rank was lost"};
  if (!gone.empty()) {
    mine = {gone.front(), concat("rank ", gone.front(), " ", describe(watch.peers().fate(gone.front())))};
  }
  close_and_throw(mine, message);
}

void LiveCall::close_and_throw(const Failure& mine, const std::string& message) {
  const Failure first = agreement_->watch().report(mine, kAnswer);
  const std::string text =
      concat("rank ", group_.rank, " lost ", first.rank >= 0 ? concat("peer ", first.rank) : std::string("a peer"),
             " in call ", number_, ", ", agreement_->record().reached(entry_).str(), ": ", first.words,
             message.empty() ? "" : concat(" (", message, ")"), ". The group is closed: make a new process group. ",
             agreement_->last_calls());
  agreement_->record().end(entry_, text);
  agreement_->close(first);
  is_closed_ = true;
  throw_peer_error(text);
}

void LiveCall::keep(std::vector<Work> works) {
  if (agreement_) agreement_->watch().peers().keep(std::move(works));
}

void LiveCall::end() {
  if (!agreement_) return;
  agreement_->record().end(entry_, "done");
  agreement_->end_call();
  if (lock_) lock_.unlock();
}

void LiveCall::fail(const std::string& message) noexcept {
  if (!agreement_) return;
  try {
    if (!is_closed_) {
      agreement_->record().end(entry_, message);
      const Failure mine{group_.rank, concat("rank ", group_.rank, " failed in call ", number_, " (",
                                             agreement_->record().reached(entry_).str(),
                                             "): ", message.substr(0, Agreement::kMaxMessage))};
      agreement_->close(agreement_->watch().report(mine, kAnswer));
      is_closed_ = true;
    }
  } catch (const std::exception&) {
    // The error on its way matters more.
  }
  if (lock_) lock_.unlock();
}

}  // namespace ringspan::binding
