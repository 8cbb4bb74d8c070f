// The softmax state of single query rows: to and from the caller's tensors, and the merge of two parts of a row.
//
// Legend: m running maximum of a row's scaled scores, l sum, o unnormalised output.
#pragma once

#include "ringspan/kernel/pack-inl.h"

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
  *state.m = -__builtin_inff();
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

// The sink of a head joins a row that ends here, as one more key whose value is 0; returns what o is to be multiplied
// with.
template <class Acc>
RINGSPAN_INLINE Acc join_sink(const ForwardWave& wave, const RowIndex& at, Acc& m, Acc& l) {
  constexpr Acc kInf = __builtin_inff();
  if (!wave.sink.data) return 1;
  const Acc sink = load_scalar<Acc>(row_of(wave.sink, 0, at.head, 0));
  const Acc joint = sink > m ? sink : m;
  if (joint == -kInf) return 1;
  const auto weight = [joint](Acc score) {
    return static_cast<Acc>(__builtin_exp(static_cast<double>(score - joint)));
  };
  const Acc keep = l == 0 ? Acc{0} : weight(m);
  l = l * keep + weight(sink);
  m = joint;
  return keep;
}

// Back to the caller's state, or, where the row ends here, to the output. An empty row becomes the one that
// softmax_state.h defines.
template <class C>
RINGSPAN_INLINE void store_row_state(const ForwardWave& wave, const RowIndex& at, const RowState<C>& state,
                                     typename C::Acc* buffer) {
  using Acc = typename C::Acc;
  constexpr Acc kInf = __builtin_inff();
  Acc m = *state.m, l = *state.l;
  const Acc keep = wave.finish ? join_sink(wave, at, m, l) : Acc{1};
  const bool empty = l == 0;
  const Acc factor = !wave.finish ? Acc{1} : empty ? Acc{0} : keep / l * static_cast<Acc>(wave.pairs.rescale);
  const RawView& view = wave.finish ? wave.out : wave.state_acc;
  Byte* target = row_of(view, at.batch, at.head, at.row);
  const bool in_place = lies_as<Acc>(view, state.panels * C::kCols);
  gather_row<C>(in_place ? reinterpret_cast<Acc*>(target) : buffer, state.o, state.panels, state.panel_stride, factor);
  if (!in_place) store_row(view, target, buffer);
  if (wave.finish) {
    const Acc lse = empty ? -kInf : static_cast<Acc>(static_cast<double>(m) + __builtin_log(static_cast<double>(l)));
    store_scalar(row_of(wave.out_max, at.batch, at.head, at.row), empty ? -kInf : m);
    store_scalar(row_of(wave.out_sum, at.batch, at.head, at.row), l);
    store_scalar(row_of(wave.out_lse, at.batch, at.head, at.row), lse);
  } else {
    store_scalar(row_of(wave.state_max, at.batch, at.head, at.row), m);
    store_scalar(row_of(wave.state_sum, at.batch, at.head, at.row), l);
  }
}

// into = into + part. The o of an empty part is never read.
template <class C>
RINGSPAN_INLINE void merge_row_state(const RowState<C>& into, const RowState<C>& part) {
  using Acc = typename C::Acc;
  constexpr Acc kInf = __builtin_inff();
  if (*part.l == 0) return;
  const Acc m = *part.m > *into.m ? *part.m : *into.m;
  const Acc reference = m == -kInf ? Acc{0} : m;
  const Acc mine = exp(splat(*into.m - reference))[0], other = exp(splat(*part.m - reference))[0];
  *into.m = m;
  *into.l = *into.l * mine + *part.l * other;
  for (int64_t panel = 0; panel < into.panels; ++panel) {
    RINGSPAN_UNROLL
    for (int j = 0; j < C::kCols; j += kLanes<Acc>) {
      Acc* target = into.o + panel * into.panel_stride + j;
      store(target, load(target) * mine + load(part.o + panel * part.panel_stride + j) * other);
    }
  }
}

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
