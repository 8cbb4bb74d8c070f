// Attention over a list of tiles, forward and backward, on strided views. FlashAttention-2 style: nothing of size
// rows x columns is ever stored (Dao 2023, arXiv:2307.08691). Query head h reads KV head h / (q heads / kv heads).
//
// Guarantees
//   - Only rows that a tile covers are read; NaN or inf in a key, value or query never reaches a row that does not
//     keep the pair.
//   - The same input gives the same bits whatever the number of threads.
//   - With `fixed_order` a row's bits depend on no other row of its side either: see ForwardArgs and BackwardArgs.
//   - No NaN for finite input: a row that keeps nothing is the empty row of softmax_state.h.
// Memory: at most Workspace::kBudgetBytes whatever the lengths, and the index of the tiles: for each query and key row
// of each batch entry 9 bytes while it is made and 1 after, and 40 bytes for each block of queries that a tile meets.
#pragma once

#include <functional>
#include <span>

#include "ringspan/base/parallel.h"
#include "ringspan/kernel/isa.h"
#include "ringspan/kernel/pair_inputs.h"
#include "ringspan/kernel/workspace.h"
#include "ringspan/mask/tile.h"
#include "ringspan/softmax/softmax_state.h"
#include "ringspan/view/tensor_view.h"

namespace ringspan {

struct ForwardArgs {
  ConstTensorView q, k, v;  // [B, N, Sq, Dqk], [B, Nkv, Skv, Dqk], [B, Nkv, Skv, Dv], one dtype
  std::span<const Tile> tiles;
  double scale = 1;
  // The running state. `begin`: it holds nothing yet and need not be initialised. `finish`: the rows end here and
  // `output` is written, every row of it; the state is then scratch. With both, the state may be default views.
  // state.max, sum, acc may be output.max, sum, out themselves (fp32, fp64): a row is read before it is written.
  SoftmaxState state;
  bool begin = true, finish = true;
  OutputView output;
  // One logit per query head, [1, N, 1, 1] in the accumulator type, that takes part in every row's softmax and has no
  // value; a default view = none. Joins where the rows end, once, so max, sum and lse include it. Finite or -inf.
  ConstTensorView sink{};
  // With dropout the state's acc is not divided by 1 - p yet; `output` is.
  PairInputs pairs{};
  // A query row gets the same bits whatever other query rows stand in the call and wherever it stands among them: keys
  // are not cut into parts for the sake of few rows. The keys, their places and the row's tiles are to be the same.
  bool fixed_order = false;
};

// state += attention of the tiles. Returns the instruction set that ran.
Isa attend(const ForwardArgs& args, Workspace& workspace, const Parallel& parallel);

struct BackwardArgs {
  ConstTensorView q, k, v;     // as in forward
  ConstTensorView dout;        // [B, N, Sq, Dv]
  ConstTensorView lse, delta;  // [B, N, Sq], accumulator type; lse of the *whole* row, delta from row_delta()
  std::span<const Tile> tiles;
  double scale = 1;
  // Gradients in the accumulator type. `*_begin`: overwrite (every row is written), else add.
  TensorView dq, dk, dv;
  bool dq_begin = true, dkv_begin = true;
  // What is not wanted costs no product, its views are not looked at: 3 of 5 products for dq alone, 4 for dk and dv.
  bool wants_dq = true, wants_dkv = true;
  // Called once, by the calling thread, before dk and dv are first touched (their other parts may still be arriving).
  // Where it is empty they may be written at any time, which is faster.
  std::function<void()> before_accumulate;
  PairInputs pairs{};
  // [B, N, rows, columns] like pairs.bias, accumulator type, strides 0 where the bias is shared; always added to. A
  // default view = not wanted. Columns may not be shared. Where heads or batch entries share it, key/value heads run
  // one after the other.
  TensorView dbias{};
  // A row of dq gets the same bits whatever other query rows stand in the call, and a row of dk and dv whatever other
  // key rows do; the rows of the other side, their places and the tiles are to be the same.
  bool fixed_order = false;
};

Isa attend_backward(const BackwardArgs& args, Workspace& workspace, const Parallel& parallel);

// delta = sum_d(out * dout) - dlse, [B, N, Sq]; a default `dlse` view counts as 0. The gradient of lse enters the
// backward of softmax only here: dS = P * (dP - delta).
void row_delta(const ConstTensorView& out, const ConstTensorView& dout, const ConstTensorView& dlse,
               const TensorView& delta, const Parallel& parallel);

// dsink[n] = - sum over batch and rows of e^(sink[n] - lse) * delta, [1, N, 1, 1] in the accumulator type; `lse` with
// the sink in it. Rows whose lse is -inf count nothing: dS = P (dP - delta), and dP = 0 for a key without a value.
void sink_gradient(const ConstTensorView& sink, const ConstTensorView& lse, const ConstTensorView& delta,
                   const TensorView& dsink, const Parallel& parallel);

// The slow reference: the same contracts in double, one pair at a time, no tiling and no shared code. It stays beside
// the fast kernels and judges them.
void attend_reference(const ForwardArgs& args);
void attend_backward_reference(const BackwardArgs& args);

}  // namespace ringspan
