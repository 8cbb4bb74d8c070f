#include "ringspan/base/parallel.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace ringspan {
namespace {

std::vector<int> counts_of(const Parallel& parallel, int num_tasks) {
  std::vector<std::atomic<int>> counts(static_cast<std::size_t>(num_tasks));
  parallel.run(num_tasks, [&](int i) { counts[static_cast<std::size_t>(i)].fetch_add(1); });
  return {counts.begin(), counts.end()};
}

TEST(ParallelTest, SerialRunsInOrder) {
  std::vector<int> order;
  Serial().run(4, [&](int i) { order.push_back(i); });
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(Serial().num_threads(), 1);
}

TEST(ParallelTest, PoolRunsEachTaskOnce) {
  for (const int num_threads : {1, 2, 3, 5}) {
    const ThreadPool pool(num_threads);
    EXPECT_EQ(pool.num_threads(), num_threads);
    for (const int num_tasks : {0, 1, 2, 7, 100}) {
      EXPECT_EQ(counts_of(pool, num_tasks), std::vector<int>(static_cast<std::size_t>(num_tasks), 1));
    }
  }
}

TEST(ParallelTest, ManyShortRunsLoseNothing) {
  const ThreadPool pool(3);
  std::atomic<int> total = 0;
  for (int round = 0; round < 500; ++round) pool.run(3, [&](int i) { total.fetch_add(i); });
  EXPECT_EQ(total, 500 * 3);
}

// Two tasks that wait for each other can only end if two threads run them.
TEST(ParallelTest, PoolRunsTasksAtTheSameTime) {
  const ThreadPool pool(2);
  std::atomic<int> arrived = 0;
  pool.run(2, [&](int) {
    arrived.fetch_add(1);
    while (arrived.load() < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 2);
}

TEST(ParallelTest, FailureReachesTheCallerAndThePoolSurvives) {
  for (const int num_threads : {1, 3}) {
    const ThreadPool pool(num_threads);
    try {
      pool.run(8, [](int i) {
        if (i == 5) throw std::runtime_error("task 5 failed");
      });
      FAIL() << "the failure was lost";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(std::string(error.what()), "task 5 failed");
    }
    EXPECT_EQ(counts_of(pool, 8), std::vector<int>(8, 1));
  }
}

TEST(ParallelTest, CallersTakeTurns) {
  const ThreadPool pool(2);
  std::atomic<int> total = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) pool.run(4, [&](int) { total.fetch_add(1); });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 3 * 50 * 4);
}

}  // namespace
}  // namespace ringspan
