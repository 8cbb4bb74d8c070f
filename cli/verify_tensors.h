// The tensors of a verification: those of the whole call, and a rank's share of them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ringspan/ring/kernel_backend.h"
#include "ringspan/shard/shard_map.h"
#include "ringspan/view/tensor_view.h"

namespace ringspan::cli {

// What enters the softmax beside q, k and v.
struct Terms {
  // kRows: [B, N, Sq, Skv], split by query rows. kShared: [1, N, 1, Skv], the same for all rows. With its gradient.
  enum class Bias : uint8_t { kNone, kRows, kShared } bias = Bias::kNone;
  bool mask = false;          // a boolean tensor [B, 1, Sq, Skv] beside the mask, which keeps most pairs
  bool slopes = false;        // ALiBi, one slope per head
  bool sink = false;          // with its gradient
  bool lse_gradient = false;  // a gradient flows into lse too
  double softcap = 0;
  double dropout = 0;  // probability
};

// `problem` with the tensors of `terms` that are split by query rows.
Problem with_terms(Problem problem, const Terms& terms);

// A dense tensor [batch, heads, rows, dim], zeros at first; one that is not given has no size. Rows may be 0.
class Dense {
 public:
  Dense() = default;
  Dense(DType dtype, Layout layout, std::array<int64_t, 4> size);
  Dense(Dense&&) = default;
  Dense& operator=(Dense&&) = default;

  const TensorView& view() const { return view_; }
  bool is_given() const { return view_.batch() > 0; }

 private:
  std::vector<std::byte> bytes_;
  TensorView view_;
};

// What is not among the terms is not given.
struct Inputs {
  Dense q, k, v, dout, dlse, bias, mask, slopes, sink;
};

struct Results {
  Dense out, max, sum, lse, dq, dk, dv;
  Dense dbias{}, dsink{};

  OutputView output() const { return {out.view(), max.view(), sum.view(), lse.view()}; }
};

// Standard normal, rounded to the problem's dtype.
Inputs random_inputs(const Problem& problem, const Terms& terms, uint64_t seed);
// The same values in double.
Inputs in_double(const Problem& problem, const Inputs& inputs);
// Zeros, for `q_rows` query rows and `kv_rows` of keys and values.
Results results_for(const Problem& problem, const Terms& terms, DType dtype, int64_t q_rows, int64_t kv_rows);

// The rows of a rank, and back; padding rows stay as they are. Bias, mask and their gradients keep all their columns.
Inputs inputs_of_rank(const Problem& problem, const Inputs& whole, const ShardMap& q_map, const ShardMap& kv_map,
                      int64_t rank);
void put_back(const Results& local, const Terms& terms, const ShardMap& q_map, const ShardMap& kv_map, int64_t rank,
              const Results& whole);

// Views over `inputs`, with numbers of pairs from `grid`, which it fills in.
Extras extras_of(const Problem& problem, const Terms& terms, const Inputs& inputs, uint64_t seed, PairGrid& grid);
// [B, N, rows, Skv] over the gradient of the bias; empty where there is none.
TensorView dbias_view(const Problem& problem, const Results& results);

}  // namespace ringspan::cli
