#include "ringspan/softmax/softmax_state.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

constexpr double kEmptyMax = -std::numeric_limits<double>::infinity();

template <class T>
T* row_of(const TensorView& view, int64_t b, int64_t n, int64_t s) {
  return reinterpret_cast<T*>(view.row(b, n, s));
}

// Factor that moves a part with row maximum `part` to the joint maximum; 0 for the identity (also -inf - -inf).
template <class T>
T rescale(T part, T joint) {
  return part == -std::numeric_limits<T>::infinity() ? T{0} : std::exp(part - joint);
}

template <class T>
void merge_typed(const SoftmaxState& part, const SoftmaxState& into) {
  for_each_row(into.max, [&](int64_t b, int64_t n, int64_t s) {
    T& max = *row_of<T>(into.max, b, n, s);
    T& sum = *row_of<T>(into.sum, b, n, s);
    const T part_max = *row_of<T>(part.max, b, n, s);
    const T joint = std::max(max, part_max);
    const T keep = rescale(max, joint);
    const T take = rescale(part_max, joint);
    sum = sum * keep + *row_of<T>(part.sum, b, n, s) * take;
    max = joint;
    T* acc = row_of<T>(into.acc, b, n, s);
    const T* part_acc = row_of<T>(part.acc, b, n, s);
    for (int64_t d = 0; d < into.acc.dim(); ++d) {
      T& element = acc[d * into.acc.stride[3]];
      element = element * keep + part_acc[d * part.acc.stride[3]] * take;
    }
  });
}

template <class T>
void add_sink_typed(const ConstTensorView& sink, const SoftmaxState& state) {
  for_each_row(state.max, [&](int64_t b, int64_t n, int64_t s) {
    const T score = *reinterpret_cast<const T*>(sink.row(0, n, 0));
    T& max = *row_of<T>(state.max, b, n, s);
    T& sum = *row_of<T>(state.sum, b, n, s);
    const T joint = std::max(max, score);
    const T keep = rescale(max, joint);
    sum = sum * keep + rescale(score, joint);
    max = joint;
    T* acc = row_of<T>(state.acc, b, n, s);
    for (int64_t d = 0; d < state.acc.dim(); ++d) acc[d * state.acc.stride[3]] *= keep;
  });
}

template <class T>
void finish_typed(const SoftmaxState& state, const OutputView& output) {
  for_each_row(state.max, [&](int64_t b, int64_t n, int64_t s) {
    const T max = *row_of<T>(state.max, b, n, s);
    const T sum = *row_of<T>(state.sum, b, n, s);
    const bool empty = sum == 0;
    *row_of<T>(output.max, b, n, s) = empty ? static_cast<T>(kEmptyMax) : max;
    *row_of<T>(output.sum, b, n, s) = sum;
    *row_of<T>(output.lse, b, n, s) = empty ? static_cast<T>(kEmptyMax) : max + std::log(sum);
    const T* acc = row_of<T>(state.acc, b, n, s);
    std::byte* out = output.out.row(b, n, s);
    for (int64_t d = 0; d < output.out.dim(); ++d) {
      const T value = empty ? T{0} : acc[d * state.acc.stride[3]] / sum;
      store_from_double(out, output.out.dtype, d * output.out.stride[3], value);
    }
  });
}

}  // namespace

OwnedSoftmaxState::OwnedSoftmaxState(DType accumulator, int64_t batch, int64_t heads, int64_t rows, int64_t v_dim)
    : storage_(static_cast<size_t>(batch * heads * rows * (v_dim + 2) * size_of(accumulator))) {
  const int64_t stats_bytes = batch * heads * rows * size_of(accumulator);
  state_.max = stats_view(storage_.data(), accumulator, batch, heads, rows);
  state_.sum = stats_view(storage_.data() + stats_bytes, accumulator, batch, heads, rows);
  state_.acc = view_of(storage_.data() + 2 * stats_bytes, accumulator, Layout::kBNSD, {batch, heads, rows, v_dim});
  set_identity(state_);
}

void set_identity(const SoftmaxState& state) {
  for_each_row(state.max, [&](int64_t b, int64_t n, int64_t s) {
    store_from_double(state.max.row(b, n, s), state.max.dtype, 0, kEmptyMax);
  });
  fill_zero(state.sum);
  fill_zero(state.acc);
}

void merge(const SoftmaxState& part, const SoftmaxState& into) {
  RINGSPAN_CHECK(part.acc.size == into.acc.size, "softmax states of different sizes: ", part.acc.rows(), " and ",
                 into.acc.rows(), " rows, head dims ", part.acc.dim(), " and ", into.acc.dim());
  into.max.dtype == DType::kF64 ? merge_typed<double>(part, into) : merge_typed<float>(part, into);
}

void add_sink(const ConstTensorView& sink, const SoftmaxState& state) {
  RINGSPAN_CHECK(sink.heads() == state.max.heads() && sink.dtype == state.max.dtype, "the sink has ", sink.heads(),
                 " heads of ", name_of(sink.dtype), ", the softmax state ", state.max.heads(), " of ",
                 name_of(state.max.dtype));
  state.max.dtype == DType::kF64 ? add_sink_typed<double>(sink, state) : add_sink_typed<float>(sink, state);
}

void finish(const SoftmaxState& state, const OutputView& output) {
  state.max.dtype == DType::kF64 ? finish_typed<double>(state, output) : finish_typed<float>(state, output);
}

}  // namespace ringspan
