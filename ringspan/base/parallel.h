// Where threads come from. Kernels never start a thread: they are handed a Parallel, so that a process has one
// pool only (the PyTorch binding hands in PyTorch's own, the standalone core its ThreadPool).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ringspan {

class Parallel {
 public:
  virtual ~Parallel() = default;

  virtual int num_threads() const = 0;

  // Runs task(0) ... task(num_tasks - 1), each once, and returns when all have returned. Tasks may run at the same
  // time or one after the other in ascending order, so a task may wait only for work that a lower one has begun.
  // The first exception of a task is rethrown here.
  virtual void run(int num_tasks, const std::function<void(int)>& task) const = 0;
};

// Runs everything on the calling thread.
class Serial final : public Parallel {
 public:
  int num_threads() const override { return 1; }
  void run(int num_tasks, const std::function<void(int)>& task) const override {
    for (int i = 0; i < num_tasks; ++i) task(i);
  }
};

// A fixed set of sleeping workers; the calling thread works too. A second caller waits until the first is done.
class ThreadPool final : public Parallel {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const override { return static_cast<int>(workers_.size()) + 1; }
  void run(int num_tasks, const std::function<void(int)>& task) const override;

 private:
  struct Shared;
  void work(Shared& shared) const;

  std::vector<std::thread> workers_;
  std::unique_ptr<Shared> shared_;
};

}  // namespace ringspan
