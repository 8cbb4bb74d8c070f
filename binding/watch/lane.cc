#include "binding/watch/lane.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

namespace ringspan::binding {

using Clock = std::chrono::steady_clock;

struct Lane::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> jobs;
  Tick tick;
  bool ends = false, is_woken = false, is_over = false;
};

namespace {

// Threads that run while the process ends would meet what is already destroyed.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<void>> lanes;
  pid_t process = ::getpid();
};

Registry& registry() {
  static auto& registry = *new Registry;
  return registry;
}

constexpr std::chrono::milliseconds kAtExit{200};

}  // namespace

// Those that are stuck are left: the process takes them along.
void Lane::end_all() {
  Registry& all = registry();
  if (all.process != ::getpid()) return;  // a forked child has none of these threads
  std::vector<std::shared_ptr<State>> states;
  {
    const std::lock_guard lock(all.mutex);
    for (const auto& lane : all.lanes) {
      if (auto state = lane.lock()) states.push_back(std::static_pointer_cast<State>(state));
    }
  }
  for (const auto& state : states) {
    const std::lock_guard lock(state->mutex);
    state->ends = true;
    state->changed.notify_all();
  }
  const auto until = Clock::now() + kAtExit;
  for (const auto& state : states) {
    std::unique_lock lock(state->mutex);
    state->changed.wait_until(lock, until, [&] { return state->is_over; });
  }
}

Lane::Lane(Tick tick) : state_(std::make_shared<State>()) {
  state_->tick = std::move(tick);
  {
    static const bool registered = std::atexit(&Lane::end_all) == 0;
    (void)registered;
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    std::erase_if(all.lanes, [](const auto& lane) { return lane.expired(); });
    all.lanes.emplace_back(state_);
  }
  // Signals belong to the program's own threads.
  sigset_t every, before;
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, &before);
  std::thread([state = state_] { work(state); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Lane::~Lane() {
  const std::lock_guard lock(state_->mutex);
  state_->ends = true;
  state_->changed.notify_all();
}

void Lane::post(std::function<void()> job) {
  const std::lock_guard lock(state_->mutex);
  if (state_->is_over) return;  // the job's promise is broken with it
  state_->jobs.push_back(std::move(job));
  state_->changed.notify_all();
}

void Lane::wake() {
  const std::lock_guard lock(state_->mutex);
  state_->is_woken = true;
  state_->changed.notify_all();
}

void Lane::work(const std::shared_ptr<State>& state) {
  std::optional<std::chrono::milliseconds> pause{0};
  std::unique_lock lock(state->mutex);
  while (pause && !state->ends) {
    state->changed.wait_for(lock, *pause, [&] { return state->ends || state->is_woken || !state->jobs.empty(); });
    if (state->ends) break;
    const bool has_job = !state->jobs.empty();
    std::function<void()> job;
    if (has_job) {
      job = std::move(state->jobs.front());
      state->jobs.pop_front();
    } else {
      state->is_woken = false;
    }
    lock.unlock();
    if (has_job) {
      job();
      job = nullptr;
    } else {
      try {
        pause = state->tick();
      } catch (const std::exception&) {
        // It looks after what has happened, and does so again.
      }
    }
    lock.lock();
  }
  // What they hold may wait for long, or for ever, when it is freed.
  const auto jobs = std::exchange(state->jobs, {});
  const Tick tick = std::exchange(state->tick, nullptr);
  state->is_over = true;
  state->changed.notify_all();
  lock.unlock();
}

}  // namespace ringspan::binding
