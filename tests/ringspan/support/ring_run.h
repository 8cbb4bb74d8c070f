// Runs a plan on in-process ranks, or one rank of it on any transport: cuts global arrays into shards, calls
// ring_forward and ring_backward, and puts the results back into global order.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <vector>

#include "ringspan/kernel/pair_inputs.h"
#include "ringspan/plan/plan.h"
#include "ringspan/transport/inproc/inproc.h"

#include "tests/ringspan/support/array.h"
#include "tests/ringspan/support/tensor.h"

namespace ringspan::test {

struct RingInputs {
  Array q, k, v, dout, dlse;  // global order; a default dlse counts as 0
  // [B or 1, N or 1, Sq or 1, Skv], a default one = none. The bias in the dtype of the call unless `bias_dtype` says
  // another; 1 in the mask keeps the pair. One row serves all queries.
  Array bias{}, mask{};
  std::array<int, 4> pair_order{0, 1, 2, 3};  // memory order and innermost stride of bias, its gradient and the mask
  int64_t pair_gap = 1;
  bool splits_one_row = false;  // with one query: its row is split by rows, so only one rank has it
  bool wants_dbias = true;
  double bias_factor = 1;
  std::optional<DType> bias_dtype{};
  bool mask_marks_masked = false;  // what bytes mean
  bool mask_by_grid = false;       // every rank has the whole mask; its rows are not shared
  Array slopes{};                  // [B or 1, N, 1, 1]
  int64_t slope_shift = 0;
  bool slope_of_root = false;
  std::vector<PairGrid> grids{};   // none = one over the whole call
  bool dout_is_one_value = false;  // dout is the same everywhere, and a view with strides 0
  std::vector<double> sink{};      // one per query head; empty = none
  double softcap = 0;
  Dropout dropout{};
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

// Whether the bias or mask has a row for each query rather than one for all.
bool is_by_row(const RingInputs& inputs, const Array& tensor, const Problem& problem);
// The grid of a query's pairs.
PairGrid grid_at(const RingInputs& inputs, const Problem& problem, int64_t q_pos);

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
