// What PairInputs does to one row of scores or weights. The rows lie in the scratch memory of a block:
//
//                 kv_row      column c = key row kv_row + c
//                   v
//      q_row --->   s s s s s s s s     row r = query row q_row + r; its kept columns are [begin, end)
//                     ^       ^
//                   begin    end
//
// Only kept pairs read an input. Legend: step = bytes from one column to the next.
#pragma once

#include "ringspan/kernel/pack-inl.h"
#include "ringspan/kernel/philox-inl.h"

namespace ringspan::RINGSPAN_ISA_NAMESPACE {

using kernel::PairRule;
using kernel::TileAxes;

// Columns that are staged at one time.
constexpr int64_t kPairPiece = 128;

// A call's rule, or null where it changes nothing.
RINGSPAN_INLINE const PairRule* rule_at_work(const PairRule& rule) {
  return rule.changes_scores || rule.drops ? &rule : nullptr;
}

// Where a block of scores lies. A null `rule` = nothing changes them.
struct PairBlock {
  const PairRule* rule;
  TileAxes axes;
  int64_t batch, head;
  int64_t q_row, kv_row;  // of the block's row 0 and column 0

  RINGSPAN_INLINE bool changes_scores() const { return rule && rule->changes_scores; }
  RINGSPAN_INLINE bool drops() const { return rule && rule->drops; }
};

RINGSPAN_INLINE const PairGrid& grid_at(const PairRule& rule, int64_t q_pos) {
  int64_t low = 0, high = rule.num_grids;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (rule.grids[middle].q_begin <= q_pos ? low : high) = middle;
  }
  return rule.grids[low];
}

// Columns [begin, end) of a block of scores.
struct Columns {
  int64_t begin, end;
};

// The inputs of one row, seen from the block's column 0.
struct PairRow {
  const Byte *bias, *mask;
  int64_t bias_step, mask_step;
  double slope;
  int64_t distance;   // with the shift in it
  int64_t kv_stride;  // positions from one column to the next
  uint64_t index;
};

inline PairRow pair_row(const PairBlock& block, int64_t r) {
  const PairRule& rule = *block.rule;
  const TileAxes& axes = block.axes;
  const int64_t row = block.q_row + r;
  const int64_t q_pos = axes.q_pos0 + (row - axes.q_row0) * axes.q_stride;
  const int64_t kv_pos = axes.kv_pos0 + (block.kv_row - axes.kv_row0) * axes.kv_stride;
  PairRow out{};
  out.kv_stride = axes.kv_stride;
  if (rule.bias.data) {
    out.bias = row_of(rule.bias, block.batch, block.head, row) + kv_pos * rule.bias.stride[3];
    out.bias_step = rule.bias.stride[3] * axes.kv_stride;
  }
  int64_t mask_row = row, mask_column = kv_pos;
  if (rule.num_grids > 0) {
    const PairGrid& grid = grid_at(rule, q_pos);
    const int64_t i = q_pos - grid.q_begin, j = kv_pos - grid.kv_begin;
    out.distance = j - i + rule.slope_shift;
    out.index = grid.origin + static_cast<uint64_t>(block.batch) * grid.batch_stride +
                static_cast<uint64_t>(block.head) * grid.head_stride + static_cast<uint64_t>(i) * grid.row_stride +
                static_cast<uint64_t>(j);
    if (rule.mask_by_grid) {
      mask_row = i;
      mask_column = j;
    }
  }
  if (rule.mask.data) {
    out.mask = row_of(rule.mask, block.batch, block.head, mask_row) + mask_column * rule.mask.stride[3];
    out.mask_step = rule.mask.stride[3] * axes.kv_stride;
  }
  if (rule.slopes.data) {
    const Byte* slope = row_of(rule.slopes, block.batch, block.head, 0);
    out.slope = rule.slopes.element == Element::kF64 ? load_scalar<double>(slope) : load_scalar<float>(slope);
  }
  return out;
}

// The rows from `row` of the block on, as far as they keep columns, [first, last). What they will read of mask and bias
// is fetched: called before the products, since from row to row it lies too far apart for the hardware to foresee.
template <std::size_t kNum>
RINGSPAN_INLINE void find_pair_rows(const PairBlock& block, int64_t row, const int64_t (&first)[kNum],
                                    const int64_t (&last)[kNum], PairRow (&rows)[kNum]) {
  const int64_t bias_bytes = bytes_of(block.rule->bias.element);
  for (std::size_t r = 0; r < kNum; ++r) {
    const int64_t count = last[r] - first[r];
    if (count <= 0) continue;
    PairRow& found = rows[r] = pair_row(block, row + static_cast<int64_t>(r));
    if (found.mask && found.mask_step == 1) prefetch_row(found.mask + first[r], count);
    if (found.bias && found.bias_step == bias_bytes) {
      prefetch_row(found.bias + first[r] * bias_bytes, count * bias_bytes);
    }
  }
}

template <class T>
RINGSPAN_INLINE void copy_run(T* dst, const Byte* p, int64_t step, int64_t count) {
  if (step == sizeof(T)) {
    __builtin_memcpy(dst, p, static_cast<std::size_t>(count) * sizeof(T));
  } else {
    for (int64_t i = 0; i < count; ++i) dst[i] = load_scalar<T>(p + i * step);
  }
}

// `count` elements that are `step` bytes apart, widened. `dst` has room for whole vectors.
inline void fetch_run(float* dst, const Byte* p, int64_t step, int64_t count, Element element) {
  if (element == Element::kF32) return copy_run(dst, p, step, count);
  uint16_t bits[kPairPiece + 2 * kLanes<float>] = {};
  copy_run(bits, p, step, count);
  for (int64_t i = 0; i < count; i += kLanes<float>) {
    store(dst + i, element == Element::kBF16 ? widen_bf16(bits + i) : widen_fp16(bits + i));
  }
}
inline void fetch_run(double* dst, const Byte* p, int64_t step, int64_t count, Element element) {
  if (element == Element::kF64) return copy_run(dst, p, step, count);
  for (int64_t i = 0; i < count; ++i) dst[i] = load_scalar<float>(p + i * step);
}

// s = cap tanh(s / cap); `derivative` (may be null) gets 1 - tanh^2.
template <class Acc>
RINGSPAN_INLINE void cap_scores(Acc* s, Columns columns, Acc cap, Acc* derivative) {
  const Acc inverse = 1 / cap;
  for (int64_t c = columns.begin; c < columns.end; c += kLanes<Acc>) {
    const Vector<Acc> t = tanh<Acc>(load(s + c) * inverse);
    store(s + c, t * cap);
    if (derivative) store(derivative + c, Acc{1} - t * t);
  }
}

// A bias of -inf masks a score of NaN too: a masked key may hold anything.
template <class Acc>
RINGSPAN_INLINE void add_bias(Acc* s, const PairRow& row, const PairRule& rule, int64_t begin, int64_t end) {
  constexpr Acc kInf = __builtin_inff();
  const auto factor = static_cast<Acc>(rule.bias_factor);
  Acc bias[kPairPiece + 2 * kLanes<Acc>];
  fetch_run(bias, row.bias + begin * row.bias_step, row.bias_step, end - begin, rule.bias.element);
  int64_t c = begin;
  for (; c + kLanes<Acc> <= end; c += kLanes<Acc>) {
    const Vector<Acc> b = load(bias + c - begin);
    store(s + c, b == -kInf ? b : load(s + c) + b * factor);
  }
  for (; c < end; ++c) s[c] = bias[c - begin] == -kInf ? -kInf : s[c] + bias[c - begin] * factor;
}

// Scores whose byte is set, or is not, become -inf; returns the column after the last whole vector.
template <bool kSet>
RINGSPAN_INLINE int64_t mask_vectors(float* s, const Byte* mask, int64_t begin, int64_t end) {
  const F32 masked = splat(-__builtin_inff());
  int64_t c = begin;
  for (; c + kLanes<float> <= end; c += kLanes<float>) {
    const F32 score = load(s + c);
    store(s + c, widen_bytes(mask + c) != 0 ? (kSet ? masked : score) : (kSet ? score : masked));
  }
  return c;
}

template <class Acc>
RINGSPAN_INLINE void mask_scores(Acc* s, const PairRow& row, bool masked_value, int64_t begin, int64_t end) {
  constexpr Acc kInf = __builtin_inff();
  if constexpr (sizeof(Acc) == sizeof(float)) {
    if (row.mask_step == 1) {
      begin = masked_value ? mask_vectors<true>(s, row.mask, begin, end) : mask_vectors<false>(s, row.mask, begin, end);
    }
  }
  for (int64_t c = begin; c < end; ++c) {
    if ((row.mask[c * row.mask_step] != 0) == masked_value) s[c] = -kInf;
  }
}

template <class Acc>
RINGSPAN_INLINE void subtract_slope(Acc* s, const PairRow& row, bool of_root, int64_t begin, int64_t end) {
  const auto slope = static_cast<Acc>(row.slope);
  for (int64_t c = begin; c < end; ++c) {
    const int64_t distance = row.distance + c * row.kv_stride;
    const auto size = static_cast<Acc>(distance < 0 ? -distance : distance);
    s[c] -= slope * (of_root ? static_cast<Acc>(__builtin_sqrt(static_cast<double>(size))) : size);
  }
}

// Products q.k to scores: `factor`, cap, bias, slope and mask, for some columns of one row. Others of the same vectors
// may change too. `derivative`: of the cap, for the same columns; may be null.
template <class Acc>
__attribute__((noinline)) void change_scores(const PairRule& rule, const PairRow& row, Acc* s, Columns columns,
                                             Acc factor, Acc* derivative) {
  const auto [begin, end] = columns;
  const int64_t whole_begin = begin / kLanes<Acc> * kLanes<Acc>, whole_end = round_up(end, kLanes<Acc>);
  if (factor != 1) {
    for (int64_t c = whole_begin; c < whole_end; c += kLanes<Acc>) store(s + c, load(s + c) * factor);
  }
  const Columns whole{whole_begin, whole_end};
  if (rule.numbers.softcap != 0) cap_scores(s, whole, static_cast<Acc>(rule.numbers.softcap), derivative);
  for (int64_t c = begin; c < end; c += kPairPiece) {
    const int64_t piece_end = smaller(c + kPairPiece, end);
    if (row.bias) add_bias(s, row, rule, c, piece_end);
    if (rule.slopes.data) subtract_slope(s, row, rule.slope_of_root, c, piece_end);
    if (row.mask) mask_scores(s, row, rule.mask_value != 0, c, piece_end);
  }
}

// keep[c] = all ones where the pair of column c is kept, else 0.
inline __attribute__((noinline)) void draw_row(const PhiloxKey& key, const PairRule& rule, const PairRow& row,
                                               uint32_t* keep, Columns columns) {
  const auto [begin, end] = columns;
  const uint64_t first = row.index + static_cast<uint64_t>(begin) * static_cast<uint64_t>(row.kv_stride);
  if (row.kv_stride == 1) {
    draw_run(key, first, end - begin, rule.threshold, keep + begin);
  } else {
    draw_apart(key, first, static_cast<uint64_t>(row.kv_stride), end - begin, rule.threshold, keep + begin);
  }
}

// Which of the vector's pairs are kept, as a condition for lanes of Acc.
template <class Acc>
RINGSPAN_INLINE auto kept_lanes(const uint32_t* keep) {
  if constexpr (sizeof(Acc) == 4) {
    return load(keep) != 0;
  } else {
    typedef uint32_t Words __attribute__((vector_size(kVectorBytes / 2), aligned(1), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const Words*>(keep), U64) != 0;
  }
}

// Weights of dropped pairs become 0.
template <class C>
RINGSPAN_INLINE void drop_weights(typename C::Word* p, const uint32_t* keep, Columns columns) {
  const auto [begin, end] = columns;
  if constexpr (C::kPair == 1) {
    for (int64_t c = begin; c < end; ++c) p[c] = keep[c] ? p[c] : 0;
  } else {
    // Column c is half c % 2 of word c / 2, the low half first.
    uint16_t halves[2];
    for (int64_t c = begin; c < end; ++c) {
      if (keep[c]) continue;
      __builtin_memcpy(halves, p + c / 2, sizeof halves);
      halves[c % 2] = 0;
      __builtin_memcpy(p + c / 2, halves, sizeof halves);
    }
  }
}

// The number of masked bytes at the beginning of [p, p + count).
RINGSPAN_INLINE int64_t count_masked(const Byte* p, int64_t count, bool masked_value) {
  int64_t i = 0;
  uint64_t word;
  if (masked_value) {
    const void* found = __builtin_memchr(p, 0, static_cast<std::size_t>(count));
    return found ? static_cast<const Byte*>(found) - p : count;
  }
  for (; i + 8 <= count; i += 8) {
    __builtin_memcpy(&word, p + i, 8);
    if (word != 0) break;
  }
  while (i < count && p[i] == 0) ++i;
  return i;
}
// The same at its end.
RINGSPAN_INLINE int64_t count_masked_at_end(const Byte* p, int64_t count, bool masked_value) {
  int64_t i = count;
  while (i > 0 && (p[i - 1] != 0) == masked_value) --i;
  return count - i;
}

// Rows [begin, end) of a tile with limits first, last relative to column 0 of the block lose the masked columns at both
// ends, as far as both limits still never move left from row to row:
//
//     . . x x x        x x x . .          a dense causal mask costs what a causal mask does
//     . . . x x   ->     x x x .          (x kept by the tile, . masked)
//     . . x . x          x . x
template <class Limit>
__attribute__((noinline)) void trim_masked(const PairBlock& block, int64_t begin, int64_t end, Limit* first,
                                           Limit* last) {
  const bool masked_value = block.rule->mask_value != 0;
  int64_t top = 0;
  for (int64_t r = begin; r < end; ++r) {
    const PairRow row = pair_row(block, r);
    const int64_t count = last[r] - first[r];
    if (row.mask_step == 1 && count > 0) {
      const int64_t skipped = count_masked(row.mask + first[r], count, masked_value);
      first[r] += static_cast<Limit>(skipped);
      last[r] -= static_cast<Limit>(count_masked_at_end(row.mask + first[r], count - skipped, masked_value));
    }
    // A row that keeps nothing any more must not hold back the others.
    if (first[r] >= last[r]) last[r] = static_cast<Limit>(top);
    top = larger(top, last[r]);
    last[r] = static_cast<Limit>(top);
  }
  int64_t low = top;
  for (int64_t r = end - 1; r >= begin; --r) {
    low = smaller(low, first[r]);
    first[r] = static_cast<Limit>(low);
  }
}

// The gradient of the bias for some columns of one row: += bias_factor * ds.
template <class Acc>
RINGSPAN_INLINE void add_bias_gradient(const RawView& dbias, const PairBlock& block, int64_t r, const Acc* ds,
                                       Columns columns) {
  const auto [begin, end] = columns;
  const TileAxes& axes = block.axes;
  const int64_t kv_pos = axes.kv_pos0 + (block.kv_row + begin - axes.kv_row0) * axes.kv_stride;
  const int64_t step = dbias.stride[3] * axes.kv_stride;
  const auto factor = static_cast<Acc>(block.rule->bias_factor);
  Byte* p = row_of(dbias, block.batch, block.head, block.q_row + r) + kv_pos * dbias.stride[3];
  int64_t c = begin;
  if (step == sizeof(Acc)) {
    for (; c + kLanes<Acc> <= end; c += kLanes<Acc>, p += kVectorBytes) {
      Acc* target = reinterpret_cast<Acc*>(p);
      store(target, load(target) + factor * load(ds + c));
    }
  }
  for (; c < end; ++c, p += step) store_scalar(p, load_scalar<Acc>(p) + factor * ds[c]);
}

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
