#include "ringspan/ring/extras.h"

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

void check_size(const char* name, const std::array<int64_t, 4>& size, const std::array<int64_t, 4>& want) {
  RINGSPAN_CHECK(size == want, name, " is [", size[0], ", ", size[1], ", ", size[2], ", ", size[3],
                 "], the plan needs [", want[0], ", ", want[1], ", ", want[2], ", ", want[3], "]");
}

// A tensor by query rows, [batch, heads, rows, columns] with strides 0 on shared axes: what the plan says of it
// must be so, for it travels with the rows.
void check_row_tensor(const char* name, const RankPlan& part, const RowTensor& planned, const ConstTensorView& view) {
  const Problem& p = part.problem;
  check_made(name, view);
  check_size(name, view.size, {p.batch, p.q_heads, part.q_rows[part.rank], p.kv_len});
  const bool is_by_row = view.stride[2] != 0;
  RINGSPAN_CHECK(is_by_row || view.data != nullptr || p.kv_len == 0, name, " has one row for all queries and no data; ",
                 "give that row's pointer on every rank, also where there are no query rows");
  RINGSPAN_CHECK(planned.is_given() || !is_by_row || !moves_queries(part), name,
                 " has a row for each query and the plan of schedule ", name_of(part.schedule),
                 ", which moves query rows, has none; give its sizes in Problem::", name);
  if (!planned.is_given()) return;
  const bool batch_fits = planned.batch == view.size[0] || view.stride[0] == 0;
  const bool heads_fit = planned.heads == view.size[1] || view.stride[1] == 0;
  RINGSPAN_CHECK(batch_fits && heads_fit, name, " has strides ", view.stride[0], " and ", view.stride[1],
                 " over batch entries and heads, the plan counts ", planned.batch, " and ", planned.heads,
                 " of them; an axis of 1 must be shared");
}

void check_given(const char* name, const RowTensor& planned, bool is_given) {
  RINGSPAN_CHECK(is_given || !planned.is_given(), "the plan has a ", name,
                 " and the call none; give both or neither, on every rank, also where there are no query rows");
}

void check_element(const char* name, const RowTensor& planned, const ConstTensorView& view) {
  RINGSPAN_CHECK(!planned.is_given() || planned.element_bytes == size_of(view.dtype), name, " is ", name_of(view.dtype),
                 " and the plan counts ", planned.element_bytes, " bytes for each of its elements");
}

// A tensor whose shared axes have size 1, as one of the full size.
TensorView expanded(TensorView view, int64_t batch, int64_t heads) {
  if (view.size[0] == 1) view.stride[0] = 0;
  if (view.size[1] == 1) view.stride[1] = 0;
  view.size[0] = batch;
  view.size[1] = heads;
  return view;
}

// The inverse for a tensor of the caller's: one entry of what is shared.
TensorView shrunk(TensorView view, const RowTensor& tensor) {
  view.size[0] = tensor.batch;
  view.size[1] = tensor.heads;
  return view;
}

// A tensor with a row axis for the block's heads of a query operand: the caller's view where its rows are the operand's
// (or shared by all rows), else what the slot holds.
TensorView rows_for(TensorView own, Payload payload, const RankPlan& part, Store& store, const Operand& q,
                    const HeadBlock& block) {
  const RowTensor& tensor = payload == Payload::kMask ? part.problem.mask : part.problem.bias;
  if (q.slot == kOwnSlot || !tensor.is_given()) {
    own.size[2] = q.rows;
    return narrow(own, 1, block.q_begin, block.q_end);
  }
  const TensorView held = expanded(store.view(payload, q), part.problem.batch, q.head_end - q.head_begin);
  return narrow(held, 1, block.q_begin - q.head_begin, block.q_end - q.head_begin);
}

}  // namespace

TensorView without_const(const ConstTensorView& view) {
  if (!view.is_given()) return {};
  return {const_cast<std::byte*>(view.data), view.dtype, view.size, view.stride};
}

void check_extras(const RankPlan& part, const Extras& extras) {
  const Problem& p = part.problem;
  const DType accumulator = accumulator_of(p.dtype);
  const PairInputs& in = extras.pairs;
  check_made("sink", extras.sink);
  if (extras.sink.is_given()) {
    check_size("sink", extras.sink.size, {1, p.q_heads, 1, 1});
    RINGSPAN_CHECK(extras.sink.dtype == accumulator, "sink is ", name_of(extras.sink.dtype), ", the plan needs ",
                   name_of(accumulator));
  }
  kernel::check_numbers(in, accumulator);
  if (in.slopes.is_given()) check_size("slopes", in.slopes.size, {p.batch, p.q_heads, 1, 1});
  check_given("bias", p.bias, in.bias.is_given());
  check_given("mask", p.mask, in.mask.is_given());
  if (in.bias.is_given()) {
    check_row_tensor("bias", part, p.bias, in.bias);
    check_element("bias", p.bias, in.bias);
  }
  const bool by_grid = in.mask.is_given() && in.mask.rows_are_grids;
  if (by_grid) check_size("mask", in.mask.size, {p.batch, p.q_heads, in.mask.size[2], in.mask.size[3]});
  RINGSPAN_CHECK(!in.grids.empty() || !(in.drops() || in.slopes.is_given() || by_grid),
                 "dropout, slopes and masks by grid need PairInputs::grids, and the call has none");
  if (in.mask.is_given() && !by_grid) {
    check_row_tensor("mask", part, p.mask, in.mask.bytes());
    check_element("mask", p.mask, in.mask.bytes());
  }
}

void check_dbias(const RankPlan& part, const PairInputs& pairs, const TensorView& dbias) {
  const RowTensor& planned = part.problem.bias;
  const DType accumulator = accumulator_of(part.problem.dtype);
  RINGSPAN_CHECK(
      !planned.has_gradient() || dbias.is_given(),
      "the plan has a gradient of the bias and the call none; give dbias, also where there are no query rows");
  check_made("dbias", dbias);
  if (!dbias.is_given()) return;
  RINGSPAN_CHECK(pairs.bias.is_given(), "dbias is given without a bias");
  RINGSPAN_CHECK(dbias.dtype == accumulator, "dbias is ", name_of(dbias.dtype), ", the plan needs ",
                 name_of(accumulator));
  check_row_tensor("dbias", part, planned, dbias);
  const bool has_elements = dbias.rows() > 0 || dbias.stride[2] == 0;
  RINGSPAN_CHECK(dbias.stride[3] != 0 || dbias.size[3] <= 1 || !has_elements, "dbias shares its ", dbias.size[3],
                 " columns; give each its own");
  RINGSPAN_CHECK(!planned.is_given() || planned.wants_gradient || !moves_queries(part),
                 "dbias is given and the plan has no gradient of the bias; set Problem::bias.wants_gradient");
}

void bind_row_tensors(const RankPlan& part, Store& store, const PairInputs& pairs) {
  const Problem& p = part.problem;
  if (p.bias.is_given()) store.bind(Payload::kBias, shrunk(without_const(pairs.bias), p.bias));
  if (p.mask.is_given()) store.bind(Payload::kMask, shrunk(without_const(pairs.mask.bytes()), p.mask));
}

void bind_dbias(const RankPlan& part, Store& store, const TensorView& dbias) {
  const RowTensor& bias = part.problem.bias;
  if (bias.is_given() && dbias.is_given()) store.bind(Payload::kDbias, shrunk(dbias, bias));
}

HeadPart head_part(const RankPlan& part, Store& store, const PairInputs& pairs, const Operand& q,
                   const HeadBlock& block) {
  HeadPart heads{.block = block, .pairs = pairs};
  if (block.q_begin > 0) heads.grids.assign(pairs.grids.begin(), pairs.grids.end());
  for (PairGrid& grid : heads.grids) grid.origin += static_cast<uint64_t>(block.q_begin) * grid.head_stride;
  heads.pairs.slopes = narrow(pairs.slopes, 1, block.q_begin, block.q_end);
  if (pairs.bias.is_given()) {
    heads.pairs.bias = rows_for(without_const(pairs.bias), Payload::kBias, part, store, q, block);
  }
  if (!pairs.mask.is_given()) return heads;
  const TensorView bytes = without_const(pairs.mask.bytes());
  const TensorView rows = pairs.mask.rows_are_grids ? narrow(bytes, 1, block.q_begin, block.q_end)
                                                    : rows_for(bytes, Payload::kMask, part, store, q, block);
  heads.pairs.mask = {rows.data, rows.size, rows.stride, pairs.mask.masked_value, pairs.mask.rows_are_grids};
  return heads;
}

TensorView dbias_part(const RankPlan& part, Store& store, const TensorView& dbias, const Operand& q,
                      const HeadBlock& block) {
  return rows_for(dbias, Payload::kDbias, part, store, q, block);
}

}  // namespace ringspan
