#include "ringspan/base/parallel.h"

#include <atomic>
#include <exception>

namespace ringspan {

// One job at a time. Workers sleep until `generation` moves, draw task numbers until none is left, and report back.
struct ThreadPool::Shared {
  std::mutex one_caller;
  std::mutex mutex;
  std::condition_variable wake, done;
  uint64_t generation = 0;
  int busy_workers = 0;
  bool stopping = false;

  const std::function<void(int)>* task = nullptr;
  int num_tasks = 0;
  std::atomic<int> next_task{0};
  std::exception_ptr failure;  // guarded by mutex
};

namespace {

template <class Shared>
void draw_tasks(Shared& shared) {
  for (;;) {
    const int i = shared.next_task.fetch_add(1, std::memory_order_relaxed);
    if (i >= shared.num_tasks) return;
    try {
      (*shared.task)(i);
    } catch (...) {
      std::lock_guard lock(shared.mutex);
      if (!shared.failure) shared.failure = std::current_exception();
    }
  }
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : shared_(std::make_unique<Shared>()) {
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(*shared_); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(shared_->mutex);
    shared_->stopping = true;
  }
  shared_->wake.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::work(Shared& shared) const {
  uint64_t seen = 0;
  std::unique_lock lock(shared.mutex);
  for (;;) {
    shared.wake.wait(lock, [&] { return shared.stopping || shared.generation != seen; });
    if (shared.stopping) return;
    seen = shared.generation;
    lock.unlock();
    draw_tasks(shared);
    lock.lock();
    if (--shared.busy_workers == 0) shared.done.notify_one();
  }
}

void ThreadPool::run(int num_tasks, const std::function<void(int)>& task) const {
  Shared& shared = *shared_;
  std::lock_guard one_caller(shared.one_caller);
  {
    std::lock_guard lock(shared.mutex);
    shared.task = &task;
    shared.num_tasks = num_tasks;
    shared.next_task.store(0, std::memory_order_relaxed);
    shared.busy_workers = static_cast<int>(workers_.size());
    shared.failure = nullptr;
    ++shared.generation;
  }
  shared.wake.notify_all();
  draw_tasks(shared);
  std::unique_lock lock(shared.mutex);
  shared.done.wait(lock, [&] { return shared.busy_workers == 0; });
  if (shared.failure) std::rethrow_exception(shared.failure);
}

}  // namespace ringspan
