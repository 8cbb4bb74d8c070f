// Lane: a thread for what may never return, such as an operation of a store that is out of reach. Whoever asks it waits
// as long as he likes, and leaves it behind.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace ringspan::binding {

class Lane {
 public:
  // `tick` runs on the thread between jobs, says when it wants to run again, and std::nullopt to end the thread.
  using Tick = std::function<std::optional<std::chrono::milliseconds>()>;

  explicit Lane(Tick tick);
  // Ends the thread after what it does now, and waits for nothing. What jobs and tick hold is freed by that thread.
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // What the job returns or throws. The future is broken where the thread has ended before.
  template <class Job>
  std::future<std::invoke_result_t<Job>> ask(Job job) {
    auto task = std::make_shared<std::packaged_task<std::invoke_result_t<Job>()>>(std::move(job));
    auto answer = task->get_future();
    post([task] { (*task)(); });
    return answer;
  }
  // Has `tick` run at once.
  void wake();

 private:
  struct State;
  void post(std::function<void()> job);
  static void work(const std::shared_ptr<State>& state);
  static void end_all();

  std::shared_ptr<State> state_;
};

}  // namespace ringspan::binding
