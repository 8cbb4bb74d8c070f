#include "ringspan/ring/ring_attention.h"

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
  RINGSPAN_CHECK(view.is_given(), name, " is not given");
  RINGSPAN_CHECK(view.dtype == dtype, name, " is ", name_of(view.dtype), ", the plan needs ", name_of(dtype));
  check_size(name, view.size, size);
  check_made(name, view);
}

void check_optional(const char* name, const ConstTensorView& view, DType dtype, const std::array<int64_t, 4>& size) {
  view.is_given() ? check_view(name, view, dtype, size) : check_made(name, view);
}

void check_call(const RankPlan& part, const Transport& transport, const InputsView& inputs, const OutputView& output) {
  const Problem& p = part.problem;
  RINGSPAN_CHECK(transport.rank() == part.rank && transport.world() == part.world, "the plan is for rank ", part.rank,
                 " of ", part.world, ", the transport is rank ", transport.rank(), " of ", transport.world());
  const int64_t q_rows = part.q_rows[part.rank], kv_rows = part.kv_rows[part.rank];
  check_view("q", inputs.q, p.dtype, {p.batch, p.q_heads, q_rows, p.qk_dim});
  check_view("k", inputs.k, p.dtype, {p.batch, p.kv_heads, kv_rows, p.qk_dim});
  check_view("v", inputs.v, p.dtype, {p.batch, p.kv_heads, kv_rows, p.v_dim});
  check_view("out", output.out, p.dtype, {p.batch, p.q_heads, q_rows, p.v_dim});
  for (const TensorView* stats : {&output.max, &output.sum, &output.lse}) {
    check_view("statistics", *stats, accumulator_of(p.dtype), {p.batch, p.q_heads, q_rows, 1});
  }
}

const Parallel& parallel_of(const RingOptions& options) {
  static const Serial serial;
  return options.parallel ? *options.parallel : serial;
}

}  // namespace

void ring_forward(const RankPlan& part, Transport& transport, const InputsView& inputs, const OutputView& output,
                  const RingOptions& options) {
  check_call(part, transport, inputs, output);
  HostStore store(part, part.forward, transport);
  KernelForward backend(part, store, inputs, output, options.extras, parallel_of(options));
  run_forward(part.forward, backend);
}

void ring_backward(const RankPlan& part, Transport& transport, const BackwardInputsView& inputs, const GradsView& grads,
                   const RingOptions& options) {
  const auto& [q, k, v] = inputs.inputs;
  const OutputView& output = inputs.output;
  const Extras& extras = options.extras;
  check_call(part, transport, inputs.inputs, output);
  check_view("dout", inputs.dout, part.problem.dtype, output.out.size);
  check_view("dq", grads.dq, q.dtype, q.size);
  check_view("dk", grads.dk, k.dtype, k.size);
  check_view("dv", grads.dv, v.dtype, v.size);
  check_optional("dlse", inputs.dlse, accumulator_of(q.dtype), output.lse.size);
  check_optional("dsink", grads.dsink, extras.sink.dtype, {1, q.heads(), 1, 1});
  RINGSPAN_CHECK(grads.dsink.is_given() == extras.sink.is_given(), "the call has ",
                 extras.sink.is_given() ? "a sink and no dsink" : "a dsink and no sink", "; give both or neither");
  HostStore store(part, part.backward, transport);
  KernelBackward backend(part, store, inputs, grads, extras, parallel_of(options));
  run_backward(part.backward, backend);
}

}  // namespace ringspan
