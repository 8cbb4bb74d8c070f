// Runs the tests on every rank of an MPI job, in the same order. Each rank fails on its own and says so; the job fails
// where one rank does. What a rank waits for has a time limit, so a failed test does not stop the next.
#include <cstdio>
#include <memory>

#include <gtest/gtest.h>

#include "ringspan/transport/mpi/mpi.h"

namespace {

// The list of tests comes from rank 0 alone; every rank shows its failures.
class RankPrinter final : public testing::EmptyTestEventListener {
 public:
  RankPrinter(int rank, testing::TestEventListener* inner) : rank_(rank), inner_(inner) {}

  void OnTestStart(const testing::TestInfo& test) override {
    if (rank_ == 0) inner_->OnTestStart(test);
  }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::printf("on rank %d:\n", rank_);
    std::fflush(stdout);
    inner_->OnTestPartResult(result);
  }
  void OnTestEnd(const testing::TestInfo& test) override {
    if (rank_ == 0 || test.result()->Failed()) inner_->OnTestEnd(test);
  }
  void OnTestIterationEnd(const testing::UnitTest& tests, int iteration) override {
    if (rank_ == 0) inner_->OnTestIterationEnd(tests, iteration);
  }

 private:
  const int rank_;
  const std::unique_ptr<testing::TestEventListener> inner_;
};

}  // namespace

int main(int argc, char** argv) {
  const ringspan::mpi::Session session(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  listeners.Append(new RankPrinter(rank, listeners.Release(listeners.default_result_printer())));
  int failed = RUN_ALL_TESTS();
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return failed;
}
