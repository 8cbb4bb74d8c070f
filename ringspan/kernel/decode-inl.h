// Few query rows: keys and values are used once each, so packing them would cost more than the products. They are
// read in place, a block of keys at a time, for all query rows of their group.
//
//   scores      each key row against each query row, along the head dim; kKeys rows of K side by side
//   softmax     as in forward-inl.h
//   output      O of a row += sum over keys p[key] * V[key], a piece of the head dim in registers at a time
//
// The limit is the memory: 2 bytes or 4 per element for one multiply-add per query row.
//
// Legend: as in forward-inl.h; row r = query head * q_len + query row, counted inside the group.
#pragma once

#include "ringspan/kernel/pairs-inl.h"
#include "ringspan/kernel/state-inl.h"

namespace ringspan::RINGSPAN_ISA_NAMESPACE {

using kernel::DecodeJob;
using kernel::DecodeMerge;
using kernel::DecodeSizes;
using kernel::KvRange;
using kernel::TileRows;

constexpr int64_t kDecodeCols = 128;  // keys of a block: 64 KB of fp32 K at 128 dims
constexpr int kKeys = 4;              // of one step; with 2 query rows 8 independent sums hide the latency
constexpr int kKeysAhead = 16;
constexpr int kPieces = 4;  // vectors of O that stay in registers

template <class Acc>
struct DecodeScratch {
  Acc* q;                 // [row][padded dim], scaled
  Acc* s;                 // [row][kDecodeCols]
  int32_t *first, *last;  // per row, relative to the first key of the job
  Acc *k, *v;             // rows that can't be read in place
  Acc* row;
  int64_t qk_padded, v_padded;

  RINGSPAN_INLINE DecodeScratch(Carver& carver, int64_t rows, int64_t qk_dim, int64_t v_dim)
      : qk_padded(round_up(qk_dim, kLanes<Acc>)), v_padded(round_up(v_dim, kPieces * kLanes<Acc>)) {
    q = carver.take<Acc>(rows * qk_padded);
    s = carver.take<Acc>(rows * kDecodeCols);
    first = carver.take<int32_t>(rows);
    last = carver.take<int32_t>(rows);
    k = carver.take<Acc>(kDecodeCols * qk_padded);
    v = carver.take<Acc>(kDecodeCols * v_padded);
    row = carver.take<Acc>(v_padded);
  }
};

template <class C>
struct DecodeState {
  using Acc = typename C::Acc;
  Acc *m, *l, *o;
  int64_t rows, panels;

  RINGSPAN_INLINE DecodeState(Carver& carver, int64_t num_rows, int64_t v_dim)
      : rows(num_rows), panels(round_up(v_dim, kPieces * kLanes<Acc>) / C::kCols) {
    m = carver.take<Acc>(rows);
    l = carver.take<Acc>(rows);
    o = carver.take<Acc>(rows * panels * C::kCols);
  }
  RINGSPAN_INLINE RowState<C> row(int64_t r) const {
    return {m + r, l + r, o + r * panels * C::kCols, panels, C::kCols};
  }
};

template <class C>
void decode_sizes(int64_t rows, int64_t qk_dim, int64_t v_dim, DecodeSizes* sizes) {
  using Acc = typename C::Acc;
  Carver scratch(nullptr), state(nullptr);
  DecodeScratch<Acc>(scratch, rows, qk_dim, v_dim);
  DecodeState<C>(state, rows, v_dim);
  sizes->partial_bytes = state.bytes();
  sizes->scratch_bytes = scratch.bytes() + state.bytes();
}

// A vector of the row at `p`, element `d` on.
template <class Acc, Element kElement>
RINGSPAN_INLINE Vector<Acc> load_element(const Byte* p, int64_t d) {
  if constexpr (kElement == Element::kBF16) {
    return widen_bf16(reinterpret_cast<const uint16_t*>(p) + d);
  } else if constexpr (kElement == Element::kF16) {
    return widen_fp16(reinterpret_cast<const uint16_t*>(p) + d);
  } else {
    return load(reinterpret_cast<const Acc*>(p) + d);
  }
}

// Rows of a block, in place or as fetched: row i at data + i * stride.
struct RowBlock {
  const Byte* data;
  int64_t stride;
  int64_t dim;  // whole vectors
};

// Keys and values of one step.
struct KeyBlock {
  RowBlock k, v;
  int64_t begin, count;  // `begin` counts from the first key of the job
};

// s[r][i] = q[r] . k[i] for kRows query rows and kKeys keys.
template <class Acc, Element kElement, int kRows>
RINGSPAN_INLINE void dot_keys(const Acc* q, int64_t q_stride, const Byte* const (&keys)[kKeys], int64_t dim, Acc* s) {
  Vector<Acc> sum[kRows][kKeys] = {};
  for (int64_t d = 0; d < dim; d += kLanes<Acc>) {
    Vector<Acc> k[kKeys];
    RINGSPAN_UNROLL
    for (int i = 0; i < kKeys; ++i) k[i] = load_element<Acc, kElement>(keys[i], d);
    RINGSPAN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Vector<Acc> x = load(q + r * q_stride + d);
      RINGSPAN_UNROLL
      for (int i = 0; i < kKeys; ++i) sum[r][i] = x * k[i] + sum[r][i];
    }
  }
  RINGSPAN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    RINGSPAN_UNROLL
    for (int i = 0; i < kKeys; ++i) s[r * kDecodeCols + i] = reduce_sum<Acc>(sum[r][i]);
  }
}

// Scores of all rows against `count` keys; what lies behind them up to the next step repeats the last key.
template <class Acc, Element kElement>
RINGSPAN_INLINE void score_rows(const DecodeScratch<Acc>& s, int64_t rows, const RowBlock& k, const RowBlock& v,
                                int64_t count) {
  constexpr int64_t kBytes = bytes_of(kElement);
  for (int64_t key = 0; key < count; key += kKeys) {
    const Byte* keys[kKeys];
    for (int i = 0; i < kKeys; ++i) {
      const int64_t at = smaller(key + i, count - 1);
      keys[i] = k.data + at * k.stride;
      // V comes next, piece by piece: an order that the hardware does not foresee (bf16: 12 ms without, 7.6 with).
      prefetch_row(v.data + at * v.stride, v.dim * kBytes);
      // Wide elements outrun the hardware's own prefetch of K (fp32: 15.5 ms without, 13.2 with).
      if constexpr (kBytes >= 4) prefetch_row(keys[i] + kKeysAhead * k.stride, k.dim * kBytes);
    }
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2) {
      dot_keys<Acc, kElement, 2>(s.q + r * s.qk_padded, s.qk_padded, keys, k.dim, s.s + r * kDecodeCols + key);
    }
    if (r < rows) {
      dot_keys<Acc, kElement, 1>(s.q + r * s.qk_padded, s.qk_padded, keys, k.dim, s.s + r * kDecodeCols + key);
    }
  }
}

template <class Acc, bool kKeptOnly>
RINGSPAN_INLINE Vector<Acc> add_value(Acc p, Vector<Acc> v, Vector<Acc> sum) {
  return kKeptOnly ? PlainCompute<Acc>::multiply_add_kept(p, v, sum) : PlainCompute<Acc>::multiply_add(p, v, sum);
}

// O of kRows rows = O alpha + p V over `keys`. kKeptOnly: as in micro-inl.h.
template <class C, Element kElement, int kRows, bool kKeptOnly>
RINGSPAN_INLINE void add_values(const typename C::Acc* p, const RowBlock& v, const KvRange& keys, typename C::Acc* o,
                                int64_t o_stride, const typename C::Acc* alpha) {
  using Acc = typename C::Acc;
  for (int64_t d = 0; d < v.dim; d += kPieces * kLanes<Acc>) {
    // The last piece may hold fewer vectors.
    const int64_t pieces = smaller(kPieces, (v.dim - d) / kLanes<Acc>);
    if (pieces == kPieces) {
      Vector<Acc> sum[kRows][kPieces];
      RINGSPAN_UNROLL
      for (int r = 0; r < kRows; ++r) {
        RINGSPAN_UNROLL
        for (int i = 0; i < kPieces; ++i) sum[r][i] = alpha[r] * load(o + r * o_stride + d + i * kLanes<Acc>);
      }
      for (int64_t key = keys.begin; key < keys.end; ++key) {
        RINGSPAN_UNROLL
        for (int i = 0; i < kPieces; ++i) {
          const Vector<Acc> x = load_element<Acc, kElement>(v.data + key * v.stride, d + i * kLanes<Acc>);
          RINGSPAN_UNROLL
          for (int r = 0; r < kRows; ++r) {
            sum[r][i] = add_value<Acc, kKeptOnly>(p[r * kDecodeCols + key], x, sum[r][i]);
          }
        }
      }
      RINGSPAN_UNROLL
      for (int r = 0; r < kRows; ++r) {
        RINGSPAN_UNROLL
        for (int i = 0; i < kPieces; ++i) store(o + r * o_stride + d + i * kLanes<Acc>, sum[r][i]);
      }
    } else {
      for (int r = 0; r < kRows; ++r) {
        for (int64_t i = d; i < v.dim; i += kLanes<Acc>) {
          Vector<Acc> sum = alpha[r] * load(o + r * o_stride + i);
          for (int64_t key = keys.begin; key < keys.end; ++key) {
            const Vector<Acc> x = load_element<Acc, kElement>(v.data + key * v.stride, i);
            sum = add_value<Acc, kKeptOnly>(p[r * kDecodeCols + key], x, sum);
          }
          store(o + r * o_stride + i, sum);
        }
      }
    }
  }
}

// Scores of one row to weights over its keys [begin, end). Returns the factor for what O holds.
template <class Acc>
RINGSPAN_INLINE Acc weigh_keys(Acc* s, int64_t begin, int64_t end, Acc& m, Acc& l) {
  constexpr Acc kInf = __builtin_inff();
  const int64_t whole_begin = begin / kLanes<Acc> * kLanes<Acc>, whole_end = round_up(end, kLanes<Acc>);
  for (int64_t c = whole_begin; c < begin; ++c) s[c] = -kInf;
  for (int64_t c = end; c < whole_end; ++c) s[c] = -kInf;
  Vector<Acc> highest = splat(-kInf);
  for (int64_t c = whole_begin; c < whole_end; c += kLanes<Acc>) highest = max(load(s + c), highest);
  const Acc next = joint_max(m, reduce_max<Acc>(highest)), reference = reference_of(next);
  const Acc alpha = exp(splat(m - reference))[0];
  Vector<Acc> sum{};
  for (int64_t c = whole_begin; c < whole_end; c += kLanes<Acc>) {
    const Vector<Acc> e = exp(load(s + c) - reference);
    store(s + c, e);
    sum += e;
  }
  m = next;
  l = l * alpha + reduce_sum<Acc>(sum);
  return alpha;
}

// What PairInputs does to the scores and to the weights of one row, query row `q` of head `head` of the group.
template <class Acc>
RINGSPAN_INLINE void change_keys(PairBlock pairs, int64_t head, int64_t q, Acc* s, Columns columns) {
  pairs.head += head;
  if (pairs.changes_scores()) {
    change_scores<Acc>(*pairs.rule, pair_row(pairs, q), s, columns, Acc{1}, nullptr);
  }
}
template <class Acc>
RINGSPAN_INLINE void drop_keys(PairBlock pairs, int64_t head, int64_t q, Acc* p, Columns columns) {
  pairs.head += head;
  if (!pairs.drops()) return;
  uint32_t keep[kDecodeCols];
  draw_row(PhiloxKey(pairs.rule->seed, pairs.rule->offset), *pairs.rule, pair_row(pairs, q), keep, columns);
  drop_weights<PlainCompute<Acc>>(p, keep, columns);
}

RINGSPAN_INLINE int64_t clip(int64_t at, int64_t count) { return smaller(larger(at, 0), count); }

// Two rows that keep the same keys read V together. `pairs`: of the query row 0 of the group's first head; null = none.
template <class C, Element kElement, bool kPairs>
RINGSPAN_INLINE void decode_block(const DecodeScratch<typename C::Acc>& s, const DecodeState<C>& state,
                                  const KeyBlock& block, const PairBlock* pairs, int64_t q_len) {
  using Acc = typename C::Acc;
  const int64_t rows = state.rows, count = block.count;
  score_rows<Acc, kElement>(s, rows, block.k, block.v, count);
  const int64_t o_stride = state.panels * C::kCols;
  for (int64_t r = 0; r < rows;) {
    const int64_t begin = clip(s.first[r] - block.begin, count), end = clip(s.last[r] - block.begin, count);
    const bool pair = r + 1 < rows && clip(s.first[r + 1] - block.begin, count) == begin &&
                      clip(s.last[r + 1] - block.begin, count) == end;
    if (begin < end) {
      Acc alpha[2];
      for (int i = 0; i < (pair ? 2 : 1); ++i) {
        Acc* row = s.s + (r + i) * kDecodeCols;
        if constexpr (kPairs) change_keys(*pairs, (r + i) / q_len, (r + i) % q_len, row, {begin, end});
        alpha[i] = weigh_keys(row, begin, end, state.m[r + i], state.l[r + i]);
        if constexpr (kPairs) drop_keys(*pairs, (r + i) / q_len, (r + i) % q_len, row, {begin, end});
      }
      Acc* o = state.o + r * o_stride;
      if (pair) {
        add_values<C, kElement, 2, kPairs>(s.s + r * kDecodeCols, block.v, {begin, end}, o, o_stride, alpha);
      } else {
        add_values<C, kElement, 1, kPairs>(s.s + r * kDecodeCols, block.v, {begin, end}, o, o_stride, alpha);
      }
    }
    r += pair ? 2 : 1;
  }
}

// Whether whole vectors of a row can be read where it lies.
template <class Acc>
RINGSPAN_INLINE bool readable_in_place(const RawView& view) {
  return view.stride[3] == bytes_of(view.element) && view.dim % kLanes<Acc> == 0;
}
RINGSPAN_INLINE RowBlock rows_in_place(const RawView& view, int64_t batch, int64_t head, int64_t row) {
  return {row_of(view, batch, head, row), view.stride[2], view.dim};
}
template <class Acc>
RINGSPAN_INLINE RowBlock fetch_rows(const RawView& view, const RowIndex& first, int64_t count, Acc* buffer,
                                    int64_t padded) {
  for (int64_t i = 0; i < count; ++i) {
    fetch_row(buffer + i * padded, view, row_of(view, first.batch, first.head, first.row + i), padded);
  }
  return {reinterpret_cast<const Byte*>(buffer), padded * static_cast<int64_t>(sizeof(Acc)), padded};
}

// The key rows `keys` of the tensors, at most kDecodeCols.
template <class C, bool kPairs>
RINGSPAN_INLINE void decode_rows(const ForwardWave& wave, const DecodeJob& job, const DecodeScratch<typename C::Acc>& s,
                                 const DecodeState<C>& state, KvRange keys, const PairBlock* pairs) {
  using Acc = typename C::Acc;
  const int64_t row = keys.begin, count = keys.end - keys.begin, q_len = wave.tiles.q_len;
  if (readable_in_place<Acc>(wave.k) && readable_in_place<Acc>(wave.v)) {
    const KeyBlock block{rows_in_place(wave.k, job.batch, job.kv_head, row),
                         rows_in_place(wave.v, job.batch, job.kv_head, row), row - job.kv_begin, count};
    if constexpr (sizeof(Acc) == 8) {
      return decode_block<C, Element::kF64, kPairs>(s, state, block, pairs, q_len);
    } else {
      if (wave.k.element == Element::kBF16) {
        return decode_block<C, Element::kBF16, kPairs>(s, state, block, pairs, q_len);
      }
      if (wave.k.element == Element::kF16) {
        return decode_block<C, Element::kF16, kPairs>(s, state, block, pairs, q_len);
      }
      return decode_block<C, Element::kF32, kPairs>(s, state, block, pairs, q_len);
    }
  }
  const RowIndex first{job.batch, job.kv_head, row};
  const KeyBlock block{fetch_rows(wave.k, first, count, s.k, s.qk_padded),
                       fetch_rows(wave.v, first, count, s.v, s.v_padded), row - job.kv_begin, count};
  constexpr Element kWide = sizeof(Acc) == 8 ? Element::kF64 : Element::kF32;
  decode_block<C, kWide, kPairs>(s, state, block, pairs, q_len);
}

// Limits of all rows of the group in one tile; rows outside it keep nothing.
template <class Acc>
RINGSPAN_INLINE void fill_group_limits(const ForwardWave& wave, const DecodeJob& job, const TileRows& rows,
                                       const DecodeScratch<Acc>& s) {
  const int64_t q_len = wave.tiles.q_len;
  for (int64_t r = 0; r < q_len; ++r) s.first[r] = s.last[r] = 0;
  kernel::fill_row_limits(*rows.tile, rows.row_begin, rows.row_end - rows.row_begin, {job.kv_begin, job.kv_end},
                          s.first + rows.row_begin, s.last + rows.row_begin);
  for (int64_t r = q_len; r < q_len * wave.heads_per_kv; ++r) {
    s.first[r] = s.first[r - q_len];
    s.last[r] = s.last[r - q_len];
  }
}

template <class C>
void decode_run(const ForwardWave& wave, const DecodeJob& job, Byte* memory) {
  using Acc = typename C::Acc;
  const int64_t q_len = wave.tiles.q_len, rows = wave.heads_per_kv * q_len;
  Carver carver(memory), partial(job.partial);
  const DecodeScratch<Acc> s(carver, rows, wave.q.dim, wave.v.dim);
  const DecodeState<C> state(partial, rows, wave.v.dim);
  const auto factor = static_cast<Acc>(wave.scale);
  for (int64_t r = 0; r < rows; ++r) {
    set_identity(state.row(r));
    Acc* q = s.q + r * s.qk_padded;
    if (wave.tiles.q_covered[job.batch * q_len + r % q_len]) {
      const int64_t head = job.kv_head * wave.heads_per_kv + r / q_len;
      fetch_row(q, wave.q, row_of(wave.q, job.batch, head, r % q_len), s.qk_padded);
      for (int64_t d = 0; d < s.qk_padded; ++d) q[d] *= factor;
    } else {
      __builtin_memset(q, 0, static_cast<std::size_t>(s.qk_padded) * sizeof(Acc));
    }
  }
  const int64_t list = job.batch * wave.tiles.num_q_blocks;
  for (int64_t t = wave.tiles.start[list]; t < wave.tiles.start[list + 1]; ++t) {
    const TileRows& tile = wave.tiles.rows[t];
    const int64_t begin = larger(tile.col_begin, job.kv_begin), end = smaller(tile.col_end, job.kv_end);
    if (begin >= end) continue;
    fill_group_limits(wave, job, tile, s);
    if (!wave.pairs.changes_scores && !wave.pairs.drops) {
      for (int64_t row = begin; row < end; row += kDecodeCols) {
        decode_rows<C, false>(wave, job, s, state, {row, smaller(row + kDecodeCols, end)}, nullptr);
      }
      continue;
    }
    PairBlock pairs{&wave.pairs, kernel::axes_of(*tile.tile), job.batch, job.kv_head * wave.heads_per_kv, 0, 0};
    for (int64_t row = begin; row < end; row += kDecodeCols) {
      pairs.kv_row = row;
      decode_rows<C, true>(wave, job, s, state, {row, smaller(row + kDecodeCols, end)}, &pairs);
    }
  }
}

// Joins the parts of one group in ascending order.
template <class C>
void decode_merge(const ForwardWave& wave, const DecodeMerge& job, Byte* memory) {
  using Acc = typename C::Acc;
  const int64_t q_len = wave.tiles.q_len, rows = wave.heads_per_kv * q_len;
  Carver carver(memory);
  const DecodeScratch<Acc> s(carver, rows, wave.q.dim, wave.v.dim);
  const DecodeState<C> state(carver, rows, wave.v.dim);
  for (int64_t r = 0; r < rows; ++r) {
    const RowIndex at{job.batch, job.kv_head * wave.heads_per_kv + r / q_len, r % q_len};
    load_row_state(wave, at, state.row(r), s.row);
    for (int64_t i = 0; i < job.num_partials; ++i) {
      Carver partial(const_cast<Byte*>(job.partials) + i * wave.sizes.partial_bytes);
      merge_row_state(state.row(r), DecodeState<C>(partial, rows, wave.v.dim).row(r));
    }
    store_row_state(wave, at, state.row(r), s.row);
  }
}

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
