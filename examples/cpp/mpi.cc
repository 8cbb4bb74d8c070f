// The ranks of an MPI job: causal attention over a sequence that they share, forward and backward, compared with one
// rank that holds everything.
#include "ringspan/transport/mpi/mpi.h"

#include <cstdio>
#include <exception>
#include <vector>

#include "sequence.h"

namespace {

// Whether this rank's results are right. All that can fail is an exception here, so that leaving tells the others.
bool run_rank() {
  ringspan::mpi::Endpoint transport(MPI_COMM_WORLD, {.timeout = std::chrono::seconds(30)});
  const ringspan::Plan plan = causal_plan(transport.world());
  const Results results = attend(plan, transport);
  const float most = difference_from_one_rank(results, plan.q_map().positions(transport.rank()));

  const double mine[2] = {most, static_cast<double>(transport.counters().bytes_sent)};
  std::vector<double> all(2 * transport.world());
  MPI_Gather(mine, 2, MPI_DOUBLE, all.data(), 2, MPI_DOUBLE, 0, MPI_COMM_WORLD);
  for (int64_t rank = 0; rank < transport.world() && transport.rank() == 0; ++rank) {
    std::printf("rank %d holds %d of %d tokens, sent %.0f bytes: %s\n", int(rank), int(plan.q_map().local_rows(rank)),
                int(kTokens), all[2 * rank + 1], all[2 * rank] < 1e-4 ? "equal to one rank" : "DIFFERS from one rank");
  }
  return most < 1e-4f;
}

}  // namespace

int main(int argc, char** argv) {
  const ringspan::mpi::Session session(argc, argv);
  try {
    return run_rank() ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
