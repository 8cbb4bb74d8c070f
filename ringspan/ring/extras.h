// Extras: what enters the softmax beside q, k and v, as a plan knows it; and what one block of heads sees of it.
#pragma once

#include <vector>

#include "ringspan/kernel/pair_inputs.h"
#include "ringspan/plan/plan.h"
#include "ringspan/ring/store.h"

namespace ringspan {

// kernel/attention.h and kernel/pair_inputs.h say what each is. A default view = none: whether something is given is
// said by its view (is_given), never by its pointer, and given on one rank means given on all, also on those without
// rows:
//
//   rows of its own     [.., .., local rows, columns]; where this rank has none, a view without elements, whose pointer
//                       may be null
//   one row for all     stride 0 over rows, size still the local rows; the pointer is that row's also where this rank
//                       has none, since other ranks' rows may be computed here. Null there is an Error.
struct Extras {
  ConstTensorView sink{};  // [1, q heads, 1, 1] in the accumulator type, the same on every rank
  PairInputs pairs{};      // bias and mask: this rank's rows, all key positions; all else the same on every rank
};

// Error where a tensor or a number does not fit the plan. `dbias` may be a default view. Cost: constant.
void check_extras(const RankPlan& part, const Extras& extras);
void check_dbias(const RankPlan& part, const PairInputs& pairs, const TensorView& dbias);

// One block of heads of the query rows that a rank works on.
struct HeadPart {
  HeadBlock block;
  PairInputs pairs;
  // The caller's, numbered from the block's first head; empty where that is the first of all.
  std::vector<PairGrid> grids{};

  // Looks at this object.
  PairInputs inputs() const {
    PairInputs inputs = pairs;
    if (!grids.empty()) inputs.grids = grids;
    return inputs;
  }
};
HeadPart head_part(const RankPlan& part, Store& store, const PairInputs& pairs, const Operand& q,
                   const HeadBlock& block);
// The block's heads of the bias's gradient, in the rows of a query operand.
TensorView dbias_part(const RankPlan& part, Store& store, const TensorView& dbias, const Operand& q,
                      const HeadBlock& block);

// Tells the store of the tensors that travel with query rows. Checked before.
void bind_row_tensors(const RankPlan& part, Store& store, const PairInputs& pairs);
void bind_dbias(const RankPlan& part, Store& store, const TensorView& dbias);

// Backends take const views of inputs; a slot may stand for them but is then only read.
TensorView without_const(const ConstTensorView& view);

}  // namespace ringspan
