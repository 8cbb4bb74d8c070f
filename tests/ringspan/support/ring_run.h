// Runs a plan on in-process ranks, or one rank of it on any transport: cuts global arrays into shards, calls
// ring_forward and ring_backward, and puts the results back into global order.
#pragma once

#include <functional>
#include <vector>

#include "ringspan/kernel/pair_inputs.h"
#include "ringspan/plan/plan.h"
#include "ringspan/transport/inproc/inproc.h"

#include "tests/ringspan/support/array.h"
#include "tests/ringspan/support/tensor.h"

namespace ringspan::test {

struct RingInputs {
  Array q, k, v, dout, dlse;  // global order; an empty dlse counts as 0
  // [B or 1, N or 1, Sq or 1, Skv] in the dtype of the call; [.., .., Sq, Skv] where 1 keeps the pair. Empty = none.
  Array bias{}, mask{};
  std::vector<double> sink{};  // one per query head; empty = none
  double softcap = 0;
  Dropout dropout{};  // over the grid of the whole call
};

struct RingResults {
  Array out, max, sum, lse, dq, dk, dv;              // global order; what no rank holds stays 0
  Array dbias;                                       // of the bias's shape, all ranks' parts together
  std::vector<double> dsink;                         // likewise
  std::vector<Array> local_out, local_dq, local_dk;  // by rank, padding rows included
  std::vector<Transport::Counters> forward, total;   // what each rank sent
};

struct RingOptions {
  double padding = 0;                                     // what padding rows of the inputs hold
  std::function<void(int64_t rank)> before_forward = {};  // disturbs the timing of a rank
  int threads = 1;                                        // per rank
};

// Tells the problem of a bias and a mask that are split by query rows, for schedules that move these.
void describe_row_tensors(const RingInputs& inputs, Problem& problem);

RingInputs random_inputs(uint64_t seed, const Problem& problem);
// One rank's tensors, in the order of its rows.
struct RankResults {
  Tensor out, max, sum, lse, dq, dk, dv;
};
// What run_ring does on one rank, on any transport.
RankResults run_rank(const Plan& plan, const RingInputs& inputs, Transport& transport, const RingOptions& options = {});

RingResults run_ring(const Plan& plan, const RingInputs& inputs, const RingOptions& options = {});

}  // namespace ringspan::test
