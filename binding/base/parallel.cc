#include "binding/base/parallel.h"

#include <algorithm>
#include <atomic>

#include <ATen/Parallel.h>

#ifndef _OPENMP
#error "compile with -fopenmp: at::parallel_for runs serially without it and says nothing"
#endif

namespace ringspan::binding {

namespace {

class TorchParallel final : public Parallel {
 public:
  int num_threads() const override { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

  // at::parallel_for gives every thread one fixed chunk. Tasks are unequal, so the chunks are the threads themselves
  // and the tasks are drawn from a counter, in ascending order as the contract of Parallel wants.
  void run(int num_tasks, const std::function<void(int)>& task) const override {
    const int threads = std::min(num_threads(), num_tasks);
    if (threads <= 1) {
      for (int i = 0; i < num_tasks; ++i) task(i);
      return;
    }
    std::atomic<int> next{0};
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      for (int i = next.fetch_add(1); i < num_tasks; i = next.fetch_add(1)) task(i);
    });
  }
};

}  // namespace

const Parallel& torch_parallel() {
  static const TorchParallel parallel;
  return parallel;
}

}  // namespace ringspan::binding
