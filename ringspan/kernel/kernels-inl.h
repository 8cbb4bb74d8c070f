// The table of one instruction set. Included last by each isa_*.cc.
#pragma once

#include "ringspan/kernel/backward-inl.h"
#include "ringspan/kernel/decode-inl.h"
#include "ringspan/kernel/forward-inl.h"

namespace ringspan::RINGSPAN_ISA_NAMESPACE {

using kernel::IsaKernels;
using kernel::KernelTable;
using kernel::RowDelta;

// delta = sum(out * dout) - dlse of rows [row_begin, row_end).
template <class Acc>
void row_delta(const RowDelta& args, int64_t batch, int64_t head, int64_t row_begin, int64_t row_end) {
  alignas(64) Acc out[kMaxHeadDim], dout[kMaxHeadDim];
  const int64_t padded = round_up(args.out.dim, kLanes<Acc>);
  for (int64_t row = row_begin; row < row_end; ++row) {
    fetch_row(out, args.out, row_of(args.out, batch, head, row), padded);
    fetch_row(dout, args.dout, row_of(args.dout, batch, head, row), padded);
    Vector<Acc> sum{};
    for (int64_t d = 0; d < padded; d += kLanes<Acc>) sum += load(out + d) * load(dout + d);
    const Acc dlse = args.dlse.data ? load_scalar<Acc>(row_of(args.dlse, batch, head, row)) : Acc{0};
    store_scalar(row_of(args.delta, batch, head, row), reduce_sum<Acc>(sum) - dlse);
  }
}

// Few rows are bound by memory, not by products: bf16 is widened on the way even where its dot product exists.
template <class C>
using DecodeCompute = PlainCompute<typename C::Acc>;

template <class C>
constexpr KernelTable kTable = {
    &forward_sizes<C>,
    &forward_pack<C>,
    &forward_run<C>,
    &forward_merge<C>,
    &decode_sizes<DecodeCompute<C>>,
    &decode_run<DecodeCompute<C>>,
    &decode_merge<DecodeCompute<C>>,
    &backward_sizes<C>,
    &backward_run<C>,
    &backward_write_q<C>,
    &backward_write_kv<C>,
    &row_delta<typename C::Acc>,
};

IsaKernels kernels() {
#ifdef RINGSPAN_ISA_BF16_DOT
  return {&kTable<F32Compute>, &kTable<F64Compute>, &kTable<Bf16Compute>};
#else
  return {&kTable<F32Compute>, &kTable<F64Compute>, nullptr};
#endif
}

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
