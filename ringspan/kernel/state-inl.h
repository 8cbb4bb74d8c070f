// The softmax state of single query rows in memory: to and from the caller's tensors, and joined part by part.
//
// Legend: as in softmax-inl.h.
#pragma once

#include "ringspan/kernel/pack-inl.h"
#include "ringspan/kernel/softmax-inl.h"

namespace ringspan::RINGSPAN_ISA_NAMESPACE {

using kernel::ForwardWave;

// Where the state of one row lies; o in pieces of kCols that are panel_stride apart.
template <class C>
struct RowState {
  typename C::Acc *m, *l, *o;
  int64_t panels, panel_stride;
};

// A row of the call's tensors.
struct RowIndex {
  int64_t batch, head, row;
};

template <class C>
RINGSPAN_INLINE void set_identity(const RowState<C>& state) {
  *state.m = kEmptyMax<typename C::Acc>;
  *state.l = 0;
  for (int64_t panel = 0; panel < state.panels; ++panel) {
    __builtin_memset(state.o + panel * state.panel_stride, 0, C::kCols * sizeof(typename C::Acc));
  }
}

// The caller's row, or the identity where nothing came before. `buffer` holds panels * kCols elements.
template <class C>
RINGSPAN_INLINE void load_row_state(const ForwardWave& wave, const RowIndex& at, const RowState<C>& state,
                                    typename C::Acc* buffer) {
  using Acc = typename C::Acc;
  if (!wave.load) return set_identity(state);
  *state.m = load_scalar<Acc>(row_of(wave.state_max, at.batch, at.head, at.row));
  *state.l = load_scalar<Acc>(row_of(wave.state_sum, at.batch, at.head, at.row));
  fetch_row(buffer, wave.state_acc, row_of(wave.state_acc, at.batch, at.head, at.row), state.panels * C::kCols);
  for (int64_t panel = 0; panel < state.panels; ++panel) {
    __builtin_memcpy(state.o + panel * state.panel_stride, buffer + panel * C::kCols, C::kCols * sizeof(Acc));
  }
}

// Back to the caller's state, or, where the row ends here, to the output: only there the sink joins.
template <class C>
RINGSPAN_INLINE void store_row_state(const ForwardWave& wave, const RowIndex& at, const RowState<C>& state,
                                     typename C::Acc* buffer) {
  using Acc = typename C::Acc;
  Acc m = *state.m, l = *state.l;
  FinishedRow<Acc> row{m, l, 0, 1};
  if (wave.finish) {
    const Acc keep = wave.sink.data ? join_sink(m, l, load_scalar<Acc>(row_of(wave.sink, 0, at.head, 0))) : Acc{1};
    row = finish_row(m, l, keep);
    row.factor *= static_cast<Acc>(wave.pairs.rescale);
  }
  const RawView& view = wave.finish ? wave.out : wave.state_acc;
  Byte* target = row_of(view, at.batch, at.head, at.row);
  const bool in_place = lies_as<Acc>(view, state.panels * C::kCols);
  gather_row<C>(in_place ? reinterpret_cast<Acc*>(target) : buffer, state.o, state.panels, state.panel_stride,
                row.factor);
  if (!in_place) store_row(view, target, buffer);
  store_scalar(row_of(wave.finish ? wave.out_max : wave.state_max, at.batch, at.head, at.row), row.max);
  store_scalar(row_of(wave.finish ? wave.out_sum : wave.state_sum, at.batch, at.head, at.row), row.sum);
  if (wave.finish) store_scalar(row_of(wave.out_lse, at.batch, at.head, at.row), row.lse);
}

// into = into + part. The o of an empty part is never read.
template <class C>
RINGSPAN_INLINE void merge_row_state(const RowState<C>& into, const RowState<C>& part) {
  using Acc = typename C::Acc;
  if (*part.l == 0) return;
  const PartFactors<Acc> factors = join_part(*into.m, *into.l, *part.m, *part.l);
  for (int64_t panel = 0; panel < into.panels; ++panel) {
    RINGSPAN_UNROLL
    for (int j = 0; j < C::kCols; j += kLanes<Acc>) {
      Acc* target = into.o + panel * into.panel_stride + j;
      store(target, load(target) * factors.into + load(part.o + panel * part.panel_stride + j) * factors.part);
    }
  }
}

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
