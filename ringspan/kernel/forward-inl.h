// Forward: one job = one block of query rows of one head against the packed keys and values of the wave.
//
//     block of K^T, V    block_kv columns              A row group (kRows rows) meets one key/value block at a time:
//            +----+----+----+----+                       S = Q K^T     one register tile per panel of kCols columns
//   row      | S  | S  | S  |    |  <- panels that       P = e^(S - m) row by row, m = running maximum
//   group    | \\ | \\ | \\ |    |     no row keeps      O = O e^(m_old - m) + P V
//            +----+----+----+----+     are skipped     so its S and P stay in the first cache level.
//
// Legend: S scaled scores; P weights; O unnormalised output; m, l running maximum and sum of a row; [first, last) the
// columns that a row keeps, relative to the block of keys.
#pragma once

#include "ringspan/kernel/pairs-inl.h"
#include "ringspan/kernel/state-inl.h"

namespace ringspan::RINGSPAN_ISA_NAMESPACE {

using kernel::ForwardJob;
using kernel::ForwardSizes;
using kernel::MergeJob;
using kernel::TileRows;

// 192 rows: a multiple of every kRows; with O and Q of 128 dims 196 KB, which leaves room for K and V in 512 KB.
constexpr int64_t kForwardRows = 192;
constexpr int64_t kMaxForwardCols = 512;
// Packed K and V of a block stay in the second cache level while all row groups pass over them.
constexpr int64_t kForwardKvBytes = 256 << 10;
// Not a power of two: rows of S and P then fall into different cache sets.
constexpr int64_t kScoreStride = kMaxForwardCols + 16;

template <class C>
RINGSPAN_INLINE int64_t forward_cols(int64_t qk_dim, int64_t v_dim) {
  const int64_t row_bytes = (qk_dim + v_dim) * static_cast<int64_t>(sizeof(typename C::Word)) / C::kPair;
  const int64_t cols = kForwardKvBytes / row_bytes / C::kCols * C::kCols;
  return larger(2 * C::kCols, smaller(cols, kMaxForwardCols));
}

// State of a block of rows. O is kept as [panel of kCols][row][kCols].
template <class C>
struct ForwardState {
  using Acc = typename C::Acc;
  static constexpr int64_t kPanelStride = kForwardRows * C::kCols;
  Acc *m, *l, *o;

  RINGSPAN_INLINE ForwardState(Carver& carver, int64_t v_panels)
      : m(carver.take<Acc>(kForwardRows)),
        l(carver.take<Acc>(kForwardRows)),
        o(carver.take<Acc>(v_panels * kPanelStride)) {}

  RINGSPAN_INLINE RowState<C> row(int64_t r, int64_t v_panels) const {
    return {m + r, l + r, o + r * C::kCols, v_panels, kPanelStride};
  }
  RINGSPAN_INLINE void clear(int64_t v_panels) const {
    for (int64_t r = 0; r < kForwardRows; ++r) set_identity(row(r, v_panels));
  }
};

template <class C>
struct ForwardScratch {
  using Acc = typename C::Acc;
  ForwardState<C> state;
  typename C::Word* q;    // row panels form
  Acc* s;                 // [kRows][kScoreStride]
  typename C::Word* p;    // the same for kPair = 1: P overwrites S
  int32_t *first, *last;  // per row, relative to the wave's first key
  typename C::Row* rows;  // fetched rows
  Acc* row;               // one row of O

  RINGSPAN_INLINE ForwardScratch(Carver& carver, const PackedDims<C>& qk, const PackedDims<C>& v)
      : state(carver, v.panels),
        q(carver.take<typename C::Word>(qk.word_panels * kForwardRows * C::kCols)),
        s(carver.take<Acc>(C::kRows * kScoreStride)),
        p(C::kPair == 1 ? reinterpret_cast<typename C::Word*>(s)
                        : carver.take<typename C::Word>(C::kRows * kScoreStride)),
        first(carver.take<int32_t>(kForwardRows)),
        last(carver.take<int32_t>(kForwardRows)),
        rows(carver.take<typename C::Row>(kLanes<typename C::Word> * larger(qk.padded, v.padded))),
        row(carver.take<Acc>(v.panels * C::kCols)) {}
};

template <class C>
void forward_sizes(int64_t qk_dim, int64_t v_dim, ForwardSizes* sizes) {
  const PackedDims<C> qk(qk_dim), v(v_dim);
  Carver scratch(nullptr), partial(nullptr);
  ForwardScratch<C>(scratch, qk, v);
  ForwardState<C>(partial, v.panels);
  const int64_t cols = forward_cols<C>(qk_dim, v_dim);
  const int64_t word_bytes = sizeof(typename C::Word);
  sizes->block_q = kForwardRows;
  sizes->block_kv = cols;
  sizes->panel_kv = C::kCols;
  sizes->k_block_bytes = round_up(cols * qk.words * word_bytes, 64);
  sizes->v_block_bytes = round_up(cols / C::kPair * v.panels * C::kCols * word_bytes, 64);
  sizes->scratch_bytes = scratch.bytes();
  sizes->partial_bytes = partial.bytes();
}

// Slot of a block in the wave's packed operands.
RINGSPAN_INLINE int64_t packed_index(const ForwardWave& wave, int64_t group, int64_t block) {
  return group * wave.blocks_per_group + block % wave.blocks_per_group;
}

template <class C>
bool forward_pack(const ForwardWave& wave, int64_t group, int64_t block, kernel::KvRange rows, Byte* scratch) {
  using Word = typename C::Word;
  const int64_t batch = (wave.first_group + group) / wave.kv_heads;
  const int64_t head = (wave.first_group + group) % wave.kv_heads;
  const int64_t index = packed_index(wave, group, block);
  const int64_t begin = wave.kv_begin + block * wave.sizes.block_kv + rows.begin, count = rows.end - rows.begin;
  const uint8_t* covered = wave.tiles.kv_covered + batch * wave.tiles.kv_len;
  PackRows range{&wave.k, batch, head, begin, smaller(begin + count, wave.kv_end), covered};
  auto* buffer = reinterpret_cast<typename C::Row*>(scratch);
  auto* k = reinterpret_cast<Word*>(wave.packed_k + index * wave.sizes.k_block_bytes);
  pack_columns<C>(k + rows.begin * PackedDims<C>(wave.k.dim).words, range, count, buffer);
  range.view = &wave.v;
  auto* v = reinterpret_cast<Word*>(wave.packed_v + index * wave.sizes.v_block_bytes);
  return pack_stacked_block<C>(v + rows.begin / C::kPair * C::kCols, range, count,
                               wave.sizes.block_kv / C::kPair * C::kCols, buffer);
}

// Row panels form of the block's query rows.
template <class C>
void pack_queries(const ForwardWave& wave, const ForwardJob& job, const ForwardScratch<C>& s) {
  const PackedDims<C> qk(wave.q.dim);
  const int64_t begin = job.q_block * kForwardRows;
  const PackRows range{&wave.q, job.batch,        job.head,
                       begin,   wave.tiles.q_len, wave.tiles.q_covered + job.batch * wave.tiles.q_len};
  const auto factor = static_cast<typename C::Acc>(wave.scale);
  for (int64_t r = 0; r < kForwardRows; ++r) {
    const auto* row = fetch_covered<C>(s.rows, range, begin + r, qk);
    pack_row_panels<C>(s.q + r * C::kCols, row, qk, kForwardRows * C::kCols, factor);
  }
}

// What a row group needs to meet one block of keys and values.
template <class C>
struct GroupBlock {
  const typename C::Word *q, *k, *v;  // of the group; of the block
  int64_t words, word_panels, v_panels;
  int64_t v_panel_stride;
  typename C::Acc factor;      // scores are multiplied by it (kScaleOnPack or changed scores: they already are)
  int64_t col_begin, col_end;  // whole panels that some row keeps a part of
  int64_t used_end;            // end of the last kept column
  int64_t first[C::kRows], last[C::kRows];
  PairBlock pairs;
  kernel::Ahead* ahead;  // may be null
};

// The first kWide vectors of one panel.
template <class C, int kWide>
RINGSPAN_INLINE void score_panel(const GroupBlock<C>& g, int64_t col, typename C::Acc* s) {
  if (g.ahead) fetch_ahead(*g.ahead);
  RegisterTile<C, kWide> tile;
  tile.clear();
  const typename C::Word* k = g.k + col * g.words;
  for (int64_t panel = 0; panel < g.word_panels; ++panel) {
    multiply_add<C, 1, C::kCols, false, kWide>(tile, g.q + panel * kForwardRows * C::kCols,
                                               k + panel * C::kCols * C::kCols,
                                               smaller(C::kCols, g.words - panel * C::kCols));
  }
  tile.store_to(s + col, kScoreStride);
}

template <class C>
RINGSPAN_INLINE void score_group(const GroupBlock<C>& g, typename C::Acc* s) {
  // Of the last panel, no more vectors than some row keeps a part of.
  const int64_t whole_end =
      g.used_end + C::kCols - kLanes<typename C::Acc> > g.col_end ? g.col_end : g.col_end - C::kCols;
  for (int64_t col = g.col_begin; col < whole_end; col += C::kCols) score_panel<C, C::kVectors>(g, col, s);
  if (whole_end < g.col_end) score_panel<C, 1>(g, whole_end, s);
}

// What PairInputs does to the scores of the group.
template <class C>
void change_group(const GroupBlock<C>& g, const PairRow (&rows)[C::kRows], typename C::Acc factor, typename C::Acc* s) {
  for (int64_t r = 0; r < C::kRows; ++r) {
    if (g.first[r] >= g.last[r]) continue;
    change_scores<typename C::Acc>(*g.pairs.rule, rows[r], s + r * kScoreStride, {g.first[r], g.last[r]}, factor,
                                   nullptr);
  }
}

template <class C>
void drop_group(const GroupBlock<C>& g, const PairRow (&rows)[C::kRows], typename C::Word* p) {
  uint32_t keep[kMaxForwardCols];
  const PhiloxKey key(g.pairs.rule->seed, g.pairs.rule->offset);
  for (int64_t r = 0; r < C::kRows; ++r) {
    if (g.first[r] >= g.last[r]) continue;
    draw_row(key, *g.pairs.rule, rows[r], keep, {g.first[r], g.last[r]});
    drop_weights<C>(p + r * kScoreStride, keep, {g.first[r], g.last[r]});
  }
}

// Scores that a row does not keep become -inf, in the vectors where some row keeps none or only a part:
//
//     columns   begin      whole_begin    whole_end     end
//     row 0       . x x x | x x x x x x x | x . . .
//     row 1       . . x x | x x x x x x x | x x . .
template <class C>
RINGSPAN_INLINE void mask_edges(const GroupBlock<C>& g, typename C::Acc* s, int64_t end) {
  using Acc = typename C::Acc;
  constexpr int kLane = kLanes<Acc>;
  int64_t low = 0, high = end;
  RINGSPAN_UNROLL
  for (int r = 0; r < C::kRows; ++r) {
    low = larger(low, g.first[r]);
    high = smaller(high, g.last[r]);
  }
  const int64_t whole_begin = round_up(low, kLane), whole_end = high / kLane * kLane;
  for (int64_t c = g.col_begin; c < end; c += kLane) {
    if (c >= whole_begin && c < whole_end) c = whole_end;
    if (c >= end) break;
    RINGSPAN_UNROLL
    for (int r = 0; r < C::kRows; ++r) {
      Acc* at = s + r * kScoreStride + c;
      store(at, keep_columns<Acc>(load(at), c, g.first[r], g.last[r], -__builtin_inff()));
    }
  }
}

template <class C>
RINGSPAN_INLINE void max_of_rows(const GroupBlock<C>& g, const typename C::Acc* s, int64_t end,
                                 typename C::Acc* highest) {
  using Acc = typename C::Acc;
  Vector<Acc> top[C::kRows];
  RINGSPAN_UNROLL
  for (int r = 0; r < C::kRows; ++r) top[r] = splat(static_cast<Acc>(-__builtin_inff()));
  for (int64_t c = g.col_begin; c < end; c += kLanes<Acc>) {
    RINGSPAN_UNROLL
    for (int r = 0; r < C::kRows; ++r) top[r] = max(load(s + r * kScoreStride + c), top[r]);
  }
  RINGSPAN_UNROLL
  for (int r = 0; r < C::kRows; ++r) highest[r] = reduce_max<Acc>(top[r]);
}

// P from the scores, and the sums of its rows.
template <class C>
RINGSPAN_INLINE void weigh_rows(const GroupBlock<C>& g, const typename C::Acc* s, typename C::Word* p, int64_t end,
                                const typename C::Acc* m, typename C::Acc* sums) {
  using Acc = typename C::Acc;
  constexpr int kStep = kLanes<Acc> * C::kPair;
  Vector<Acc> sum[C::kRows] = {};
  for (int64_t c = g.col_begin; c < end; c += kStep) {
    RINGSPAN_UNROLL
    for (int r = 0; r < C::kRows; ++r) {
      const Acc* row = s + r * kScoreStride + c;
      if constexpr (C::kPair == 1) {
        const Vector<Acc> e = exp(load(row) - m[r]);
        store(p + r * kScoreStride + c, e);
        sum[r] += e;
      } else {
#ifdef RINGSPAN_ISA_BF16_DOT
        const F32 e0 = exp(load(row) * g.factor - m[r]);
        const F32 e1 = exp(load(row + kLanes<Acc>) * g.factor - m[r]);
        store(p + r * kScoreStride + c / C::kPair, pack_neighbours(e0, e1));
        sum[r] += e0 + e1;
#endif
      }
    }
  }
  RINGSPAN_UNROLL
  for (int r = 0; r < C::kRows; ++r) sums[r] = reduce_sum<Acc>(sum[r]);
}

// Scores to weights for all rows of the group; m and l move on. Returns whether O must be rescaled, by `alpha`.
template <class C>
RINGSPAN_INLINE bool softmax_group(const GroupBlock<C>& g, typename C::Acc* s, typename C::Word* p, typename C::Acc* m,
                                   typename C::Acc* l, typename C::Acc* alpha) {
  using Acc = typename C::Acc;
  constexpr int kStep = kLanes<Acc> * C::kPair;
  constexpr int kSlots = (C::kRows + kLanes<Acc> - 1) / kLanes<Acc> * kLanes<Acc>;
  const int64_t end = round_up(g.used_end, kStep);
  mask_edges(g, s, end);
  Acc change[kSlots] = {}, reference[C::kRows], highest[C::kRows], sums[C::kRows];
  max_of_rows(g, s, end, highest);
  bool rescale = false;
  RINGSPAN_UNROLL
  for (int r = 0; r < C::kRows; ++r) {
    if constexpr (!C::kScaleOnPack) highest[r] *= g.factor;
    const Acc next = joint_max(m[r], highest[r]);
    reference[r] = reference_of(next);
    // A row of -inf only stays as it is.
    change[r] = next == kEmptyMax<Acc> ? Acc{0} : m[r] - next;
    rescale |= change[r] != 0;
    m[r] = next;
  }
  for (int r = 0; r < kSlots; r += kLanes<Acc>) store(alpha + r, exp(load(change + r)));
  weigh_rows(g, s, p, end, reference, sums);
  RINGSPAN_UNROLL
  for (int r = 0; r < C::kRows; ++r) l[r] = l[r] * alpha[r] + sums[r];
  return rescale;
}

// O = O alpha + P V
template <class C, bool kKeptOnly>
RINGSPAN_INLINE void accumulate_group(const GroupBlock<C>& g, const typename C::Word* p, typename C::Acc* o,
                                      const typename C::Acc* alpha, bool rescale) {
  const typename C::Word* a = p + g.col_begin / C::kPair;
  const int64_t depth = ceil_div(g.used_end - g.col_begin, C::kPair);
  for (int64_t panel = 0; panel < g.v_panels; ++panel) {
    typename C::Acc* target = o + panel * ForwardState<C>::kPanelStride;
    const typename C::Word* v = g.v + panel * g.v_panel_stride + g.col_begin / C::kPair * C::kCols;
    RegisterTile<C> tile;
    tile.load_from(target, C::kCols);
    if (rescale) tile.scale_rows(alpha);
    multiply_add<C, 1, kScoreStride, kKeptOnly>(tile, a, v, depth);
    tile.store_to(target, C::kCols);
  }
}

// Kept columns of the group's rows inside the block that starts at `block_begin`; false where there are none.
template <class C>
RINGSPAN_INLINE bool clip_group(GroupBlock<C>& g, const int32_t* first, const int32_t* last, int64_t block_begin,
                                int64_t block_cols) {
  int64_t begin = block_cols, end = 0;
  RINGSPAN_UNROLL
  for (int r = 0; r < C::kRows; ++r) {
    g.first[r] = larger(first[r] - block_begin, 0);
    g.last[r] = smaller(last[r] - block_begin, block_cols);
    if (g.first[r] >= g.last[r]) continue;
    begin = smaller(begin, g.first[r]);
    end = larger(end, g.last[r]);
  }
  g.col_begin = begin / C::kCols * C::kCols;
  g.col_end = round_up(end, C::kCols);
  g.used_end = end;
  return begin < end;
}

// All row groups of `rows` against the packed block at `index`, whose first key is pairs.kv_row. Rows outside the tile
// have empty limits.
template <class C>
void attend_block(const ForwardWave& wave, const ForwardJob& job, const ForwardScratch<C>& s, const TileRows& rows,
                  int64_t index, const PairBlock& pairs) {
  const int64_t row_begin = rows.row_begin - pairs.q_row, row_end = rows.row_end - pairs.q_row;
  // Limits count from the first key of the job.
  const int64_t block_begin = pairs.kv_row - job.kv_begin;
  const PackedDims<C> qk(wave.q.dim), v(wave.v.dim);
  GroupBlock<C> g;
  g.k = reinterpret_cast<const typename C::Word*>(wave.packed_k + index * wave.sizes.k_block_bytes);
  g.v = reinterpret_cast<const typename C::Word*>(wave.packed_v + index * wave.sizes.v_block_bytes);
  g.words = qk.words;
  g.word_panels = qk.word_panels;
  g.v_panels = v.panels;
  g.v_panel_stride = wave.sizes.block_kv / C::kPair * C::kCols;
  const auto factor = static_cast<typename C::Acc>(__builtin_fabs(wave.scale));
  g.factor = pairs.changes_scores() ? 1 : factor;
  g.pairs = pairs;
  g.ahead = job.ahead;
  typename C::Acc alpha[64 / sizeof(typename C::Acc) + C::kRows];
  for (int64_t row = row_begin / C::kRows * C::kRows; row < row_end; row += C::kRows) {
    if (!clip_group(g, s.first + row, s.last + row, block_begin, wave.sizes.block_kv)) continue;
    g.q = s.q + row * C::kCols;
    PairRow pair_rows[C::kRows];
    if (pairs.rule) find_pair_rows(pairs, row, g.first, g.last, pair_rows);
    score_group(g, s.s);
    if (pairs.changes_scores()) change_group(g, pair_rows, C::kScaleOnPack ? 1 : factor, s.s);
    const bool rescale = softmax_group(g, s.s, s.p, s.state.m + row, s.state.l + row, alpha);
    if (pairs.drops()) drop_group(g, pair_rows, s.p);
    typename C::Acc* o = s.state.o + row * C::kCols;
    if (wave.v_nonfinite[index]) {
      accumulate_group<C, true>(g, s.p, o, alpha, rescale);
    } else {
      accumulate_group<C, false>(g, s.p, o, alpha, rescale);
    }
  }
}

// The state of the block's rows as the caller keeps it; rows beyond the tensor are empty.
template <class C>
void load_state(const ForwardWave& wave, const RowIndex& first, const ForwardScratch<C>& s, int64_t v_panels) {
  for (int64_t r = 0; r < kForwardRows; ++r) {
    const RowState<C> row = s.state.row(r, v_panels);
    if (first.row + r < wave.tiles.q_len) {
      load_row_state(wave, {first.batch, first.head, first.row + r}, row, s.row);
    } else {
      set_identity(row);
    }
  }
}

template <class C>
void store_state(const ForwardWave& wave, const RowIndex& first, const ForwardScratch<C>& s, int64_t v_panels) {
  const int64_t count = smaller(kForwardRows, wave.tiles.q_len - first.row);
  for (int64_t r = 0; r < count; ++r) {
    store_row_state(wave, {first.batch, first.head, first.row + r}, s.state.row(r, v_panels), s.row);
  }
}

// The part of one tile that lies in the job.
template <class C>
RINGSPAN_INLINE void attend_tile(const ForwardWave& wave, const ForwardJob& job, const ForwardScratch<C>& s,
                                 const TileRows& rows, int64_t col_begin, int64_t col_end) {
  const int64_t group = job.batch * wave.kv_heads + job.head / wave.heads_per_kv - wave.first_group;
  const int64_t q_begin = job.q_block * kForwardRows, block_kv = wave.sizes.block_kv;
  const int64_t row_begin = rows.row_begin - q_begin, row_end = rows.row_end - q_begin;
  const int64_t group_end = round_up(row_end, C::kRows);
  for (int64_t r = row_begin / C::kRows * C::kRows; r < group_end; ++r) s.first[r] = s.last[r] = 0;
  kernel::fill_row_limits(*rows.tile, rows.row_begin, row_end - row_begin, {job.kv_begin, job.kv_end},
                          s.first + row_begin, s.last + row_begin);
  const int64_t block_end = ceil_div(col_end - wave.kv_begin, block_kv);
  PairBlock pairs{rule_at_work(wave.pairs), kernel::axes_of(*rows.tile), job.batch, job.head, q_begin, job.kv_begin};
  if (wave.pairs.mask.data) trim_masked(pairs, row_begin, row_end, s.first, s.last);
  for (int64_t block = (col_begin - wave.kv_begin) / block_kv; block < block_end; ++block) {
    pairs.kv_row = wave.kv_begin + block * block_kv;
    attend_block(wave, job, s, rows, packed_index(wave, group, block), pairs);
  }
}

template <class C>
void forward_run(const ForwardWave& wave, const ForwardJob& job, Byte* memory) {
  Carver carver(memory);
  const PackedDims<C> qk(wave.q.dim), v(wave.v.dim);
  ForwardScratch<C> s(carver, qk, v);
  const RowIndex first{job.batch, job.head, job.q_block * kForwardRows};
  if (job.partial) {
    Carver partial(job.partial);
    s.state = ForwardState<C>(partial, v.panels);
    s.state.clear(v.panels);
  } else {
    load_state(wave, first, s, v.panels);
  }
  const int64_t list = job.batch * wave.tiles.num_q_blocks + job.q_block;
  bool packed = false;
  for (int64_t t = wave.tiles.start[list]; t < wave.tiles.start[list + 1]; ++t) {
    const TileRows& rows = wave.tiles.rows[t];
    const int64_t col_begin = larger(rows.col_begin, job.kv_begin), col_end = smaller(rows.col_end, job.kv_end);
    if (col_begin >= col_end) continue;
    if (!packed) pack_queries(wave, job, s);
    packed = true;
    attend_tile(wave, job, s, rows, col_begin, col_end);
  }
  if (!job.partial) store_state(wave, first, s, v.panels);
}

// Joins the parts of one q block with what came before, in ascending order.
template <class C>
void forward_merge(const ForwardWave& wave, const MergeJob& job, Byte* memory) {
  Carver carver(memory);
  const PackedDims<C> qk(wave.q.dim), v(wave.v.dim);
  const ForwardScratch<C> s(carver, qk, v);
  const RowIndex first{job.batch, job.head, job.q_block * kForwardRows};
  load_state(wave, first, s, v.panels);
  for (int64_t i = 0; i < job.num_partials; ++i) {
    Carver partial(const_cast<Byte*>(job.partials) + i * wave.sizes.partial_bytes);
    const ForwardState<C> part(partial, v.panels);
    for (int64_t r = 0; r < kForwardRows; ++r) merge_row_state(s.state.row(r, v.panels), part.row(r, v.panels));
  }
  store_state(wave, first, s, v.panels);
}

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
