#include "ringspan/ring/ring_attention.h"

#include <tuple>

#include "ringspan/base/error.h"
#include "ringspan/ring/executor.h"
#include "ringspan/ring/host_store.h"

namespace ringspan {
namespace {

void check_size(const char* name, const std::array<int64_t, 4>& size, const std::array<int64_t, 4>& want) {
  RINGSPAN_CHECK(size == want, name, " is [", size[0], ", ", size[1], ", ", size[2], ", ", size[3],
                 "], the plan needs [", want[0], ", ", want[1], ", ", want[2], ", ", want[3], "]");
}

void check_view(const char* name, const ConstTensorView& view, DType dtype, const std::array<int64_t, 4>& size) {
  RINGSPAN_CHECK(view.dtype == dtype, name, " is ", name_of(view.dtype), ", the plan needs ", name_of(dtype));
  check_size(name, view.size, size);
}

// A tensor by query rows, [batch, heads, rows, columns] with strides 0 on shared axes: what the plan says of it
// must be so, for it travels with the rows.
void check_row_tensor(const char* name, const RankPlan& part, const RowTensor& planned,
                      const std::array<int64_t, 4>& size, const std::array<int64_t, 4>& stride) {
  const bool is_by_row = stride[2] != 0;
  RINGSPAN_CHECK(planned.is_given() || !is_by_row || !moves_queries(part), name,
                 " has a row for each query and the plan of schedule ", name_of(part.schedule),
                 ", which moves query rows, has none; give its sizes in Problem::", name);
  if (!planned.is_given()) return;
  const bool batch_fits = planned.batch == size[0] || stride[0] == 0;
  const bool heads_fit = planned.heads == size[1] || stride[1] == 0;
  RINGSPAN_CHECK(batch_fits && heads_fit, name, " has strides ", stride[0], " and ", stride[1],
                 " over batch entries and heads, the plan counts ", planned.batch, " and ", planned.heads,
                 " of them; an axis of 1 must be shared");
}

void check_call(const RankPlan& part, const Transport& transport, const ConstTensorView& q, const ConstTensorView& k,
                const ConstTensorView& v, const OutputView& output, const Extras& extras) {
  const Problem& p = part.problem;
  RINGSPAN_CHECK(transport.rank() == part.rank && transport.world() == part.world, "the plan is for rank ", part.rank,
                 " of ", part.world, ", the transport is rank ", transport.rank(), " of ", transport.world());
  const int64_t q_rows = part.q_rows[part.rank], kv_rows = part.kv_rows[part.rank];
  check_view("q", q, p.dtype, {p.batch, p.q_heads, q_rows, p.qk_dim});
  check_view("k", k, p.dtype, {p.batch, p.kv_heads, kv_rows, p.qk_dim});
  check_view("v", v, p.dtype, {p.batch, p.kv_heads, kv_rows, p.v_dim});
  check_view("out", output.out, p.dtype, {p.batch, p.q_heads, q_rows, p.v_dim});
  for (const TensorView* stats : {&output.max, &output.sum, &output.lse}) {
    check_view("statistics", *stats, accumulator_of(p.dtype), {p.batch, p.q_heads, q_rows, 1});
  }
  if (extras.sink.data) check_view("sink", extras.sink, accumulator_of(p.dtype), {1, p.q_heads, 1, 1});
  const std::array<int64_t, 4> pairs{p.batch, p.q_heads, q_rows, p.kv_len};
  const PairInputs& in = extras.pairs;
  for (const auto& [name, planned, data] :
       {std::tuple("bias", &p.bias, in.bias.data), std::tuple("mask", &p.mask, in.mask.data)}) {
    RINGSPAN_CHECK(data || !planned->is_given() || q_rows == 0, "the plan has a ", name,
                   " and the call none; give both or neither");
  }
  if (in.bias.data) {
    check_size("bias", in.bias.size, pairs);
    check_row_tensor("bias", part, p.bias, in.bias.size, in.bias.stride);
  }
  if (in.mask.data && !in.mask.rows_are_grids) {
    check_size("mask", in.mask.size, pairs);
    check_row_tensor("mask", part, p.mask, in.mask.size, in.mask.stride);
  }
}

}  // namespace

void ring_forward(const RankPlan& part, Transport& transport, const ConstTensorView& q, const ConstTensorView& k,
                  const ConstTensorView& v, const OutputView& output, const Parallel& parallel, const Extras& extras) {
  check_call(part, transport, q, k, v, output, extras);
  HostStore store(part, transport);
  KernelForward backend(part, store, q, k, v, output, extras, parallel);
  run_forward(part.forward, backend);
}

void ring_backward(const RankPlan& part, Transport& transport, const ConstTensorView& q, const ConstTensorView& k,
                   const ConstTensorView& v, const OutputView& output, const ConstTensorView& dout,
                   const ConstTensorView& dlse, const GradsView& grads, const Parallel& parallel,
                   const Extras& extras) {
  check_call(part, transport, q, k, v, output, extras);
  check_view("dout", dout, part.problem.dtype, output.out.size);
  check_view("dq", grads.dq, q.dtype, q.size);
  check_view("dk", grads.dk, k.dtype, k.size);
  check_view("dv", grads.dv, v.dtype, v.size);
  if (dlse.data) check_view("dlse", dlse, accumulator_of(q.dtype), output.lse.size);
  if (extras.sink.data) check_view("dsink", grads.dsink, extras.sink.dtype, extras.sink.size);
  if (grads.dbias.data) check_view("dbias", grads.dbias, accumulator_of(q.dtype), extras.pairs.bias.size);
  const RowTensor& bias = part.problem.bias;
  RINGSPAN_CHECK(!bias.wants_gradient || grads.dbias.data || part.q_rows[part.rank] == 0,
                 "the plan has a gradient of the bias and the call none; give dbias");
  HostStore store(part, transport);
  KernelBackward backend(part, store, q, k, v, output, dout, dlse, grads, extras, parallel);
  run_backward(part.backward, backend);
}

void ring_backward(const RankPlan& part, Transport& transport, const ConstTensorView& q, const ConstTensorView& k,
                   const ConstTensorView& v, const OutputView& output, const ConstTensorView& dout,
                   const GradsView& grads, const Parallel& parallel) {
  ring_backward(part, transport, q, k, v, output, dout, ConstTensorView{}, grads, parallel);
}

}  // namespace ringspan
