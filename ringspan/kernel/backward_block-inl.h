// One block of query rows against one block of keys and values: what backward-inl.h does to each pair that meets.
//
//   q block      +----+----+----+        Row groups first fill P and dS of the whole q block; then column groups
//   (rows)       |    | \\ | \\ |        (kRows columns of P and dS are the rows of dV and dK) and row groups (dQ)
//                |    |    | \\ |        run over it. Outside the panels that a row group computed, P and dS are zero
//                +----+----+----+        between the first and the last column group.
//
// Legend: as in backward-inl.h.
#pragma once

#include "ringspan/kernel/pairs-inl.h"

namespace ringspan::RINGSPAN_ISA_NAMESPACE {

constexpr int64_t kBackwardRows = 96;
constexpr int64_t kMaxBackwardCols = 192;
// K^T, V^T, K, dK and dV of a block.
constexpr int64_t kBackwardKvBytes = 384 << 10;
constexpr int64_t kGradStride = kMaxBackwardCols + 16;

// A multiple of both, so that column groups fit.
template <class C>
constexpr int64_t kColStep = C::kRows % 3 == 0 ? 3 * C::kCols : C::kCols;

template <class C>
RINGSPAN_INLINE int64_t backward_cols(int64_t qk_dim, int64_t v_dim) {
  const int64_t row_bytes = (2 * qk_dim + v_dim) * static_cast<int64_t>(sizeof(typename C::Word)) / C::kPair +
                            (qk_dim + v_dim) * static_cast<int64_t>(sizeof(typename C::Acc));
  const int64_t cols = kBackwardKvBytes / row_bytes / kColStep<C> * kColStep<C>;
  return larger(kColStep<C>, smaller(cols, kMaxBackwardCols / kColStep<C> * kColStep<C>));
}

// One q block of one head in the wave's memory.
template <class C>
struct QueryBlock {
  using Acc = typename C::Acc;
  using Word = typename C::Word;
  static constexpr int64_t kRowPanelStride = kBackwardRows * C::kCols;
  static constexpr int64_t kStackedPanelStride = kBackwardRows / C::kPair * C::kCols;
  Word *q_rows, *dout_rows;        // row panels form
  Word *q_stacked, *dout_stacked;  // stacked form; the same memory for kPair = 1
  Acc *lse, *delta;
  Acc* dq;             // [panel][row][kCols]
  uint8_t* nonfinite;  // of Q, of dO

  RINGSPAN_INLINE QueryBlock(Carver& carver, const PackedDims<C>& qk, const PackedDims<C>& v)
      : q_rows(carver.take<Word>(qk.word_panels * kRowPanelStride)),
        dout_rows(carver.take<Word>(v.word_panels * kRowPanelStride)),
        q_stacked(C::kPair == 1 ? q_rows : carver.take<Word>(qk.panels * kStackedPanelStride)),
        dout_stacked(C::kPair == 1 ? dout_rows : carver.take<Word>(v.panels * kStackedPanelStride)),
        lse(carver.take<Acc>(kBackwardRows)),
        delta(carver.take<Acc>(kBackwardRows)),
        dq(carver.take<Acc>(qk.panels * kRowPanelStride)),
        nonfinite(carver.take<uint8_t>(2)) {}
};

// The sums of one key/value block in the wave's memory, [panel][row][kCols].
template <class C>
struct KvSums {
  typename C::Acc *dk, *dv;
  RINGSPAN_INLINE KvSums(Carver& carver, const PackedDims<C>& qk, const PackedDims<C>& v, int64_t cols)
      : dk(carver.take<typename C::Acc>(qk.panels * cols * C::kCols)),
        dv(carver.take<typename C::Acc>(v.panels * cols * C::kCols)) {}
};

template <class C>
struct BackwardScratch {
  using Acc = typename C::Acc;
  using Word = typename C::Word;
  Word *k_columns, *v_columns, *k_stacked;
  Word *p, *ds;   // [row or row pair][kGradStride]: a of P^T dO and dS^T Q
  Word* ds_rows;  // a of dS K; the same memory as ds for kPair = 1
  Acc* s;         // one register tile of P, kPair = 2 only
  // PairInputs: changed scores, the cap's derivative and the draws of a row group; one register tile of dS.
  Acc *scores, *cap, *tile;
  uint32_t* keep;
  int32_t *first, *last;
  typename C::Row* rows;

  RINGSPAN_INLINE BackwardScratch(Carver& carver, const PackedDims<C>& qk, const PackedDims<C>& v, int64_t cols)
      : k_columns(carver.take<Word>(cols * qk.words)),
        v_columns(carver.take<Word>(cols * v.words)),
        k_stacked(carver.take<Word>(cols / C::kPair * qk.panels * C::kCols)),
        p(carver.take<Word>(kBackwardRows / C::kPair * kGradStride)),
        ds(carver.take<Word>(kBackwardRows / C::kPair * kGradStride)),
        ds_rows(C::kPair == 1 ? ds : carver.take<Word>(kBackwardRows * kGradStride)),
        s(carver.take<Acc>(C::kRows * C::kCols)),
        scores(carver.take<Acc>(C::kRows * kGradStride)),
        cap(carver.take<Acc>(C::kRows * kGradStride)),
        tile(carver.take<Acc>(C::kRows * C::kCols)),
        keep(carver.take<uint32_t>(C::kRows * kGradStride)),
        first(carver.take<int32_t>(kBackwardRows)),
        last(carver.take<int32_t>(kBackwardRows)),
        rows(carver.take<typename C::Row>(kLanes<Word> * larger(qk.padded, v.padded))) {}
};

// The operands of a job, and the part of a block that is in work.
template <class C>
struct BackwardBlock {
  const BackwardScratch<C>& s;
  QueryBlock<C> q;
  KvSums<C> sums;
  PackedDims<C> qk, v;
  int64_t cols;  // of a key/value block
  bool k_nonfinite;
  typename C::Acc factor;          // of scores, unless kScaleOnPack
  int64_t row_begin, row_end;      // rows of the tile inside the q block
  int64_t zero_begin, zero_end;    // columns that column groups will read
  int64_t group_begin, group_end;  // column groups
  PairBlock pairs;
  const kernel::RawView* dbias;  // null = not asked for

  RINGSPAN_INLINE bool changes_gradients() const {
    return pairs.drops() || dbias || (pairs.changes_scores() && pairs.rule->scales_gradients != 0);
  }
};

// Rows of kCols elements in memory, as a register tile lies there.
template <class Acc>
struct TileMemory {
  Acc* data;
  int64_t row_stride;
};

template <class C>
struct ColumnLimits {
  int64_t first[C::kRows], last[C::kRows];
  int64_t begin, end;  // whole panels
  int64_t used_end;
};

template <class C>
RINGSPAN_INLINE bool clip_columns(ColumnLimits<C>& limits, const int32_t* first, const int32_t* last, int64_t cols) {
  int64_t begin = cols, end = 0;
  for (int r = 0; r < C::kRows; ++r) {
    limits.first[r] = first[r];
    limits.last[r] = last[r];
    if (first[r] >= last[r]) continue;
    begin = smaller(begin, first[r]);
    end = larger(end, last[r]);
  }
  limits.begin = begin / C::kCols * C::kCols;
  limits.end = round_up(end, C::kCols);
  limits.used_end = end;
  return begin < end;
}

// a B of one panel or of its first vector: scores or dP.
template <class C, int kWide>
RINGSPAN_INLINE void multiply_panel(RegisterTile<C, kWide>& tile, const typename C::Word* a, const typename C::Word* b,
                                    const PackedDims<C>& dims) {
  tile.clear();
  for (int64_t panel = 0; panel < dims.word_panels; ++panel) {
    multiply_add<C, 1, C::kCols, false, kWide>(tile, a + panel * QueryBlock<C>::kRowPanelStride,
                                               b + panel * C::kCols * C::kCols,
                                               smaller(C::kCols, dims.words - panel * C::kCols));
  }
}

#ifdef RINGSPAN_ISA_BF16_DOT
// P or dS of a register tile as pairs of rows, and dS also as pairs of columns.
template <class C>
RINGSPAN_INLINE void store_row_pairs(const RegisterTile<C>& tile, uint32_t* pairs) {
  RINGSPAN_UNROLL
  for (int r = 0; r < C::kRows; r += 2) {
    RINGSPAN_UNROLL
    for (int j = 0; j < C::kVectors; ++j) {
      store(pairs + r / 2 * kGradStride + j * kLanes<float>, pack_across(tile.v[r][j], tile.v[r + 1][j]));
    }
  }
}
template <class C>
RINGSPAN_INLINE void store_column_pairs(const RegisterTile<C>& tile, uint32_t* rows) {
  RINGSPAN_UNROLL
  for (int r = 0; r < C::kRows; ++r) store(rows + r * kGradStride, pack_neighbours(tile.v[r][0], tile.v[r][1]));
}
#endif

// Before the panels of a row group: scores as PairInputs changes them, and its draws.
template <class C>
void prepare_pairs(const BackwardBlock<C>& b, const ColumnLimits<C>& limits, int64_t row) {
  PairRow rows[C::kRows];
  find_pair_rows(b.pairs, row, limits.first, limits.last, rows);
  if (b.pairs.changes_scores()) {
    for (int64_t col = limits.begin; col < limits.end; col += C::kCols) {
      RegisterTile<C> tile;
      multiply_panel(tile, b.q.q_rows + row * C::kCols, b.s.k_columns + col * b.qk.words, b.qk);
      tile.store_to(b.s.scores + col, kGradStride);
    }
  }
  const PhiloxKey key(b.pairs.rule->seed, b.pairs.rule->offset);
  for (int64_t r = 0; r < C::kRows; ++r) {
    const int64_t first = limits.first[r], last = limits.last[r];
    if (first >= last) continue;
    if (b.pairs.changes_scores()) {
      change_scores<typename C::Acc>(*b.pairs.rule, rows[r], b.s.scores + r * kGradStride, {first, last},
                                     C::kScaleOnPack ? 1 : b.factor, b.s.cap + r * kGradStride);
    }
    if (b.pairs.drops()) draw_row(key, *b.pairs.rule, rows[r], b.s.keep + r * kGradStride, {first, last});
  }
}

// dS of a register tile where PairInputs has a part in it, from dP in the scratch `tile` and P. With dropout P loses
// the dropped pairs here: dV sees it like that. (The register tile itself stays out of here: with its address taken,
// the compiler would keep it in memory.)
template <class C>
void change_gradients(const BackwardBlock<C>& b, const ColumnLimits<C>& limits, int64_t row, int64_t col,
                      TileMemory<typename C::Acc> p, TileMemory<typename C::Acc> result) {
  using Acc = typename C::Acc;
  const bool drops = b.pairs.drops(), scales = b.pairs.changes_scores() && b.pairs.rule->scales_gradients != 0;
  const auto rescale = static_cast<Acc>(b.pairs.rule->rescale);
  for (int64_t r = 0; r < C::kRows; ++r) {
    const Acc* dp_row = b.s.tile + r * C::kCols;
    Acc* ds = result.data + r * result.row_stride;
    Acc* weight = p.data + r * p.row_stride;
    const Acc delta = b.q.delta[row + r];
    const uint32_t* keep = b.s.keep + r * kGradStride + col;
    RINGSPAN_UNROLL
    for (int j = 0; j < C::kCols; j += kLanes<Acc>) {
      const Vector<Acc> e = load(weight + j);
      Vector<Acc> dp = load(dp_row + j) * rescale;
      if (drops) {
        const auto kept = kept_lanes<Acc>(keep + j);
        dp = kept ? dp : Vector<Acc>{};
        store(weight + j, kept ? e : Vector<Acc>{});
      }
      // Where nothing is kept, e is 0 and dP may be NaN.
      store(ds + j, e == 0 ? Vector<Acc>{} : e * (dp - delta));
    }
    const int64_t begin = larger(limits.first[r], col), end = smaller(limits.last[r], col + C::kCols);
    if (b.dbias && begin < end) add_bias_gradient<Acc>(*b.dbias, b.pairs, row + r, ds - col, {begin, end});
    if (!scales) continue;
    const Acc* cap = b.s.cap + r * kGradStride + col;
    for (int j = 0; j < C::kCols; j += kLanes<Acc>) {
      const Vector<Acc> d = load(ds + j);
      store(ds + j, d == 0 ? d : d * load(cap + j));
    }
  }
}

// P of one row group and one panel of columns, to `p`.
template <class C, int kWide>
RINGSPAN_INLINE void fill_weights(const BackwardBlock<C>& b, const ColumnLimits<C>& limits, int64_t row, int64_t col,
                                  bool masked, TileMemory<typename C::Acc> p) {
  using Acc = typename C::Acc;
  constexpr int kLane = kLanes<Acc>;
  RegisterTile<C, kWide> tile;
  Acc factor = b.factor;
  if (b.pairs.changes_scores()) {
    tile.load_from(b.s.scores + col, kGradStride);
    factor = 1;
  } else {
    multiply_panel(tile, b.q.q_rows + row * C::kCols, b.s.k_columns + col * b.qk.words, b.qk);
  }
  RINGSPAN_UNROLL
  for (int r = 0; r < C::kRows; ++r) {
    RINGSPAN_UNROLL
    for (int j = 0; j < kWide; ++j) {
      Vector<Acc> score = tile.v[r][j];
      if constexpr (!C::kScaleOnPack) score *= factor;
      Vector<Acc> e = exp(score - b.q.lse[row + r]);
      if (masked) e = keep_columns<Acc>(e, col + j * kLane, limits.first[r], limits.last[r]);
      tile.v[r][j] = e;
      store(p.data + r * p.row_stride + j * kLane, e);
    }
  }
#ifdef RINGSPAN_ISA_BF16_DOT
  if constexpr (C::kPair == 2) {
    if (!b.pairs.drops()) store_row_pairs(tile, b.s.p + row / 2 * kGradStride + col);
  }
#endif
}

// dS of the same, to where dK and dQ read it; and P where dropout takes from it.
template <class C, int kWide>
RINGSPAN_INLINE void fill_gradients(const BackwardBlock<C>& b, const ColumnLimits<C>& limits, int64_t row, int64_t col,
                                    TileMemory<typename C::Acc> p) {
  using Acc = typename C::Acc;
  constexpr int kLane = kLanes<Acc>;
  RegisterTile<C, kWide> tile;
  multiply_panel(tile, b.q.dout_rows + row * C::kCols, b.s.v_columns + col * b.v.words, b.v);
  if (b.changes_gradients()) {
    tile.store_to(b.s.tile, C::kCols);
    if constexpr (C::kPair == 1) {
      change_gradients<C>(b, limits, row, col, p, {b.s.ds + row * kGradStride + col, kGradStride});
    }
#ifdef RINGSPAN_ISA_BF16_DOT
    if constexpr (C::kPair == 2) {
      change_gradients<C>(b, limits, row, col, p, {b.s.tile, C::kCols});
      tile.load_from(b.s.tile, C::kCols);
      RegisterTile<C> kept;
      kept.load_from(p.data, p.row_stride);
      store_row_pairs(kept, b.s.p + row / 2 * kGradStride + col);
    }
#endif
  } else {
    RINGSPAN_UNROLL
    for (int r = 0; r < C::kRows; ++r) {
      RINGSPAN_UNROLL
      for (int j = 0; j < kWide; ++j) {
        const Vector<Acc> e = load(p.data + r * p.row_stride + j * kLane);
        // Not e * (...): dP may be NaN where nothing is kept.
        const Vector<Acc> ds = e == 0 ? Vector<Acc>{} : e * (tile.v[r][j] - b.q.delta[row + r]);
        tile.v[r][j] = ds;
        if constexpr (C::kPair == 1) store(b.s.ds + (row + r) * kGradStride + col + j * kLane, ds);
      }
    }
  }
#ifdef RINGSPAN_ISA_BF16_DOT
  if constexpr (C::kPair == 2) {
    store_row_pairs(tile, b.s.ds + row / 2 * kGradStride + col);
    store_column_pairs(tile, b.s.ds_rows + row * kGradStride + col / 2);
  }
#endif
}

// P and dS of one row group and one panel of columns, or of the panel's first vector.
template <class C, int kWide = C::kVectors>
RINGSPAN_INLINE void grad_scores(const BackwardBlock<C>& b, const ColumnLimits<C>& limits, int64_t row, int64_t col,
                                 bool masked) {
  TileMemory<typename C::Acc> p{b.s.s, C::kCols};
  if constexpr (C::kPair == 1) p = {b.s.p + row * kGradStride + col, kGradStride};
  fill_weights<C, kWide>(b, limits, row, col, masked, p);
  fill_gradients<C, kWide>(b, limits, row, col, p);
}

template <class C>
RINGSPAN_INLINE void clear_columns(const BackwardBlock<C>& b, int64_t row, int64_t begin, int64_t end) {
  using Word = typename C::Word;
  for (int64_t r = row / C::kPair; r < (row + C::kRows) / C::kPair; ++r) {
    for (int64_t c = begin; c < end; c += kLanes<Word>) {
      store(b.s.p + r * kGradStride + c, Vector<Word>{});
      store(b.s.ds + r * kGradStride + c, Vector<Word>{});
    }
  }
}

// P and dS of the whole q block.
template <class C>
RINGSPAN_INLINE void fill_scores(const BackwardBlock<C>& b) {
  for (int64_t row = b.row_begin / C::kRows * C::kRows; row < b.row_end; row += C::kRows) {
    ColumnLimits<C> limits;
    if (!clip_columns(limits, b.s.first + row, b.s.last + row, b.cols)) {
      clear_columns(b, row, b.zero_begin, b.zero_end);
      continue;
    }
    int64_t all_first = 0, all_last = b.cols;
    for (int r = 0; r < C::kRows; ++r) {
      all_first = larger(all_first, limits.first[r]);
      all_last = smaller(all_last, limits.last[r]);
    }
    clear_columns(b, row, b.zero_begin, limits.begin);
    if (b.pairs.rule) prepare_pairs(b, limits, row);
    const auto is_masked = [&](int64_t col) { return col < all_first || col + C::kCols > all_last; };
    // Of the last panel, no more vectors than some row keeps a part of.
    constexpr int64_t kLane = kLanes<typename C::Acc>;
    const bool is_cut = C::kPair == 1 && limits.used_end + kLane <= limits.end && !b.pairs.rule && !b.dbias;
    const int64_t whole_end = is_cut ? limits.end - C::kCols : limits.end;
    for (int64_t col = limits.begin; col < whole_end; col += C::kCols) {
      grad_scores(b, limits, row, col, is_masked(col));
    }
    if constexpr (C::kPair == 1) {
      if (is_cut) grad_scores<C, 1>(b, limits, row, whole_end, is_masked(whole_end));
    }
    clear_columns(b, row, is_cut ? whole_end + kLane : limits.end, b.zero_end);
  }
}

// target += a^T b for one column group: rows of P or dS are the depth.
template <class C, bool kKeptOnly>
RINGSPAN_INLINE void add_column_group(const BackwardBlock<C>& b, const typename C::Word* a,
                                      const typename C::Word* stacked, typename C::Acc* target, int64_t panels,
                                      int64_t depth) {
  for (int64_t panel = 0; panel < panels; ++panel) {
    RegisterTile<C> tile;
    typename C::Acc* sums = target + panel * b.cols * C::kCols;
    tile.load_from(sums, C::kCols);
    multiply_add<C, kGradStride, 1, kKeptOnly>(tile, a, stacked + panel * QueryBlock<C>::kStackedPanelStride, depth);
    tile.store_to(sums, C::kCols);
  }
}

// dV += P^T dO and dK += dS^T Q. Limits never move left, so the rows that keep a column are one range.
template <class C>
RINGSPAN_INLINE void add_kv_sums(const BackwardBlock<C>& b) {
  int64_t begin = b.row_begin, end = b.row_begin;
  for (int64_t col = b.group_begin; col < b.group_end; col += C::kRows) {
    while (begin < b.row_end && b.s.last[begin] <= col) ++begin;
    while (end < b.row_end && b.s.first[end] < col + C::kRows) ++end;
    if (begin >= end) continue;
    const int64_t top = begin / C::kPair;
    const int64_t depth = ceil_div(end, C::kPair) - top;
    const int64_t at = top * kGradStride + col;
    const typename C::Word* dout = b.q.dout_stacked + top * C::kCols;
    const typename C::Word* q = b.q.q_stacked + top * C::kCols;
    if (b.q.nonfinite[1]) {
      add_column_group<C, true>(b, b.s.p + at, dout, b.sums.dv + col * C::kCols, b.v.panels, depth);
    } else {
      add_column_group<C, false>(b, b.s.p + at, dout, b.sums.dv + col * C::kCols, b.v.panels, depth);
    }
    if (b.q.nonfinite[0]) {
      add_column_group<C, true>(b, b.s.ds + at, q, b.sums.dk + col * C::kCols, b.qk.panels, depth);
    } else {
      add_column_group<C, false>(b, b.s.ds + at, q, b.sums.dk + col * C::kCols, b.qk.panels, depth);
    }
  }
}

// dQ += dS K
template <class C, bool kKeptOnly>
RINGSPAN_INLINE void add_q_sums(const BackwardBlock<C>& b) {
  for (int64_t row = b.row_begin / C::kRows * C::kRows; row < b.row_end; row += C::kRows) {
    ColumnLimits<C> limits;
    if (!clip_columns(limits, b.s.first + row, b.s.last + row, b.cols)) continue;
    const typename C::Word* a = b.s.ds_rows + row * kGradStride + limits.begin / C::kPair;
    const int64_t depth = ceil_div(limits.used_end - limits.begin, C::kPair);
    for (int64_t panel = 0; panel < b.qk.panels; ++panel) {
      RegisterTile<C> tile;
      typename C::Acc* target = b.q.dq + panel * QueryBlock<C>::kRowPanelStride + row * C::kCols;
      const typename C::Word* k = b.s.k_stacked + (panel * b.cols + limits.begin) / C::kPair * C::kCols;
      tile.load_from(target, C::kCols);
      multiply_add<C, 1, kGradStride, kKeptOnly>(tile, a, k, depth);
      tile.store_to(target, C::kCols);
    }
  }
}

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
