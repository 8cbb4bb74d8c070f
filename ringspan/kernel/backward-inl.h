// Backward: one job = one block of keys and values of one key/value head against every query block that meets it.
//
//     P  = e^(S - lse)           S = Q K^T scaled, lse of the whole row: no maximum is searched
//     dS = P (dP - delta)        dP = dO V^T, in the same register tile as P
//     dV += P^T dO,  dK += dS^T Q,  dQ += dS K
//
//   q block      +----+----+----+        Row groups first fill P and dS of the whole q block; then column groups
//   (rows)       |    | \\ | \\ |        (kRows columns of P and dS are the rows of dV and dK) and row groups (dQ)
//                |    |  \\| \\ |        run over it. Outside the panels that a row group computed, P and dS are zero
//                +----+----+----+        between the first and the last column group.
//
// dQ of a q block gets a sum from many jobs. They add in ascending order of key/value block, each waiting for its turn,
// so the bits don't depend on the number of threads. Jobs are claimed in ascending order, so the one that a job waits
// for has begun: no deadlock.
//
// Legend: as in forward-inl.h; dO gradient of out; delta = sum(out dO) - dlse of a row.
#pragma once

#include <sched.h>

#include "ringspan/kernel/forward-inl.h"

namespace ringspan::RINGSPAN_ISA_NAMESPACE {

using kernel::BackwardJob;
using kernel::BackwardSizes;
using kernel::BackwardStep;
using kernel::BackwardWave;

constexpr int64_t kBackwardRows = 96;
constexpr int64_t kMaxBackwardCols = 192;
// K^T, V^T, K, dK and dV of a block.
constexpr int64_t kBackwardKvBytes = 256 << 10;
constexpr int64_t kGradStride = kMaxBackwardCols + 16;

// A multiple of both, so that column groups fit.
template <class C>
constexpr int64_t kColStep = C::kRows % 3 == 0 ? 3 * C::kCols : C::kCols;

template <class C>
RINGSPAN_INLINE int64_t backward_cols(int64_t qk_dim, int64_t v_dim) {
  const int64_t row_bytes =
      (2 * qk_dim + v_dim) * static_cast<int64_t>(sizeof(typename C::Word)) / C::kPair +
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
  Acc* dq;                         // [panel][row][kCols]
  uint8_t* nonfinite;              // of Q, of dO

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
  Word *p, *ds;           // [row or row pair][kGradStride]: a of P^T dO and dS^T Q
  Word* ds_rows;          // a of dS K; the same memory as ds for kPair = 1
  Acc* s;                 // one register tile of P, kPair = 2 only
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
        first(carver.take<int32_t>(kBackwardRows)),
        last(carver.take<int32_t>(kBackwardRows)),
        rows(carver.take<typename C::Row>(kLanes<Word> * larger(qk.padded, v.padded))) {}
};

template <class C>
void backward_sizes(int64_t qk_dim, int64_t v_dim, BackwardSizes* sizes) {
  const PackedDims<C> qk(qk_dim), v(v_dim);
  const int64_t cols = backward_cols<C>(qk_dim, v_dim);
  Carver q_block(nullptr), kv_block(nullptr), scratch(nullptr);
  QueryBlock<C>(q_block, qk, v);
  KvSums<C>(kv_block, qk, v, cols);
  BackwardScratch<C>(scratch, qk, v, cols);
  sizes->block_q = kBackwardRows;
  sizes->block_kv = cols;
  sizes->q_block_bytes = q_block.bytes();
  sizes->kv_block_bytes = kv_block.bytes();
  sizes->scratch_bytes = scratch.bytes();
}

template <class C>
RINGSPAN_INLINE int64_t query_index(const BackwardWave& wave, int64_t group, int64_t head, int64_t q_block) {
  return (group * (wave.head_end - wave.head_begin) + head - wave.head_begin) * wave.q_blocks + q_block;
}
template <class C>
RINGSPAN_INLINE QueryBlock<C> query_block(const BackwardWave& wave, int64_t group, int64_t head, int64_t q_block) {
  const int64_t index = query_index<C>(wave, group, head, q_block);
  Carver carver(wave.packed_q + index * wave.sizes.q_block_bytes);
  return QueryBlock<C>(carver, PackedDims<C>(wave.q.dim), PackedDims<C>(wave.v.dim));
}
template <class C>
RINGSPAN_INLINE KvSums<C> kv_sums(const BackwardWave& wave, int64_t group, int64_t kv_block) {
  Carver carver(wave.sums_kv + (group * wave.kv_blocks + kv_block) * wave.sizes.kv_block_bytes);
  return KvSums<C>(carver, PackedDims<C>(wave.q.dim), PackedDims<C>(wave.v.dim), wave.sizes.block_kv);
}

// Row panels (times `factor`) and stacked panels of `range`. Returns whether inf or NaN was found.
template <class C>
RINGSPAN_INLINE bool pack_both_forms(typename C::Word* row_panels, typename C::Word* stacked, const RowRange& range,
                                     typename C::Acc factor, typename C::Row* buffer) {
  const PackedDims<C> dims(range.view->dim);
  bool nonfinite = false;
  for (int64_t r = 0; r < kBackwardRows; r += C::kPair) {
    const typename C::Row* fetched[C::kPair];
    for (int i = 0; i < C::kPair; ++i) {
      fetched[i] = fetch_covered<C>(buffer + i * dims.padded, range, range.begin + r + i, dims);
      nonfinite |= any_nonfinite(fetched[i], dims.padded);
      pack_row_panels<C>(row_panels + (r + i) * C::kCols, fetched[i], dims, QueryBlock<C>::kRowPanelStride, factor);
    }
    if constexpr (C::kPair == 2) {
      pack_stacked<C>(stacked + r / C::kPair * C::kCols, fetched, dims, QueryBlock<C>::kStackedPanelStride);
    }
  }
  return nonfinite;
}

template <class C>
void backward_pack(const BackwardWave& wave, int64_t group, int64_t head, int64_t q_block, Byte* scratch) {
  using Acc = typename C::Acc;
  const int64_t batch = (wave.first_group + group) / wave.kv_heads;
  const int64_t q_head = (wave.first_group + group) % wave.kv_heads * wave.heads_per_kv + head;
  const QueryBlock<C> block = query_block<C>(wave, group, head, q_block);
  const PackedDims<C> qk(wave.q.dim);
  auto* rows = reinterpret_cast<typename C::Row*>(scratch);
  const int64_t begin = wave.q_begin + q_block * kBackwardRows;
  RowRange range{&wave.q, batch, q_head, begin, wave.q_end, wave.tiles.q_covered + batch * wave.tiles.q_len};
  const Acc q_factor = C::kScaleOnPack ? static_cast<Acc>(wave.scale) : Acc{1};
  block.nonfinite[0] = pack_both_forms<C>(block.q_rows, block.q_stacked, range, q_factor, rows);
  range.view = &wave.dout;
  block.nonfinite[1] = pack_both_forms<C>(block.dout_rows, block.dout_stacked, range, Acc{1}, rows);
  for (int64_t r = 0; r < kBackwardRows; ++r) {
    // An infinite lse makes P of an absent or empty row exactly 0.
    block.lse[r] = __builtin_inff();
    block.delta[r] = 0;
    if (begin + r >= wave.q_end || !range.covered[begin + r]) continue;
    const Acc lse = load_scalar<Acc>(row_of(wave.lse, batch, q_head, begin + r));
    if (lse == -__builtin_inff()) continue;
    block.lse[r] = lse;
    block.delta[r] = load_scalar<Acc>(row_of(wave.delta, batch, q_head, begin + r));
  }
  __builtin_memset(block.dq, 0, static_cast<std::size_t>(qk.panels * QueryBlock<C>::kRowPanelStride) * sizeof(Acc));
}

// The operands of a job, and the part of a block that is in work.
template <class C>
struct BackwardBlock {
  const BackwardScratch<C>& s;
  QueryBlock<C> q;
  KvSums<C> sums;
  PackedDims<C> qk, v;
  int64_t cols;                 // of a key/value block
  bool k_nonfinite;
  typename C::Acc factor;       // of scores, unless kScaleOnPack
  int64_t row_begin, row_end;   // rows of the tile inside the q block
  int64_t zero_begin, zero_end; // columns that column groups will read
  int64_t group_begin, group_end;  // column groups
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

// Zero outside [first, last) of a row, for the vector whose first lane is column `col`.
template <class Acc>
RINGSPAN_INLINE Vector<Acc> keep_columns(Vector<Acc> v, int64_t col, int64_t first, int64_t last) {
  const Vector<Acc> lane = iota<Acc>();
  v = lane >= static_cast<Acc>(first - col) ? v : Vector<Acc>{};
  return lane < static_cast<Acc>(last - col) ? v : Vector<Acc>{};
}

// a B of one panel: scores or dP.
template <class C>
RINGSPAN_INLINE void multiply_panel(RegisterTile<C>& tile, const typename C::Word* a, const typename C::Word* b,
                                    const PackedDims<C>& dims) {
  tile.clear();
  for (int64_t panel = 0; panel < dims.word_panels; ++panel) {
    multiply_add<C, 1, C::kCols>(tile, a + panel * QueryBlock<C>::kRowPanelStride, b + panel * C::kCols * C::kCols,
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

// P and dS of one row group and one panel of columns.
template <class C>
RINGSPAN_INLINE void grad_scores(const BackwardBlock<C>& b, const ColumnLimits<C>& limits, int64_t row, int64_t col,
                                 bool masked) {
  using Acc = typename C::Acc;
  constexpr int kLane = kLanes<Acc>;
  RegisterTile<C> tile;
  Acc* p = b.s.s;
  int64_t p_stride = C::kCols;
  if constexpr (C::kPair == 1) {
    p = b.s.p + row * kGradStride + col;
    p_stride = kGradStride;
  }
  multiply_panel(tile, b.q.q_rows + row * C::kCols, b.s.k_columns + col * b.qk.words, b.qk);
  RINGSPAN_UNROLL
  for (int r = 0; r < C::kRows; ++r) {
    RINGSPAN_UNROLL
    for (int j = 0; j < C::kVectors; ++j) {
      Vector<Acc> score = tile.v[r][j];
      if constexpr (!C::kScaleOnPack) score *= b.factor;
      Vector<Acc> e = exp(score - b.q.lse[row + r]);
      if (masked) e = keep_columns<Acc>(e, col + j * kLane, limits.first[r], limits.last[r]);
      tile.v[r][j] = e;
      store(p + r * p_stride + j * kLane, e);
    }
  }
#ifdef RINGSPAN_ISA_BF16_DOT
  if constexpr (C::kPair == 2) store_row_pairs(tile, b.s.p + row / 2 * kGradStride + col);
#endif
  multiply_panel(tile, b.q.dout_rows + row * C::kCols, b.s.v_columns + col * b.v.words, b.v);
  RINGSPAN_UNROLL
  for (int r = 0; r < C::kRows; ++r) {
    RINGSPAN_UNROLL
    for (int j = 0; j < C::kVectors; ++j) {
      const Vector<Acc> e = load(p + r * p_stride + j * kLane);
      // Not e * (...): dP may be NaN where nothing is kept.
      const Vector<Acc> ds = e == 0 ? Vector<Acc>{} : e * (tile.v[r][j] - b.q.delta[row + r]);
      tile.v[r][j] = ds;
      if constexpr (C::kPair == 1) store(b.s.ds + (row + r) * kGradStride + col + j * kLane, ds);
    }
  }
#ifdef RINGSPAN_ISA_BF16_DOT
  if constexpr (C::kPair == 2) {
    store_row_pairs(tile, b.s.ds + row / 2 * kGradStride + col);
    store_column_pairs(tile, b.s.ds_rows + row * kGradStride + col / 2);
  }
#endif
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
    for (int64_t col = limits.begin; col < limits.end; col += C::kCols) {
      grad_scores(b, limits, row, col, col < all_first || col + C::kCols > all_last);
    }
    clear_columns(b, row, limits.end, b.zero_end);
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

RINGSPAN_INLINE void wait_for_turn(const uint32_t* turns, uint32_t turn) {
  constexpr int kSpins = 256;
  for (int spin = 0; __atomic_load_n(turns, __ATOMIC_ACQUIRE) != turn; ++spin) {
    if (spin >= kSpins) {
      sched_yield();
    } else {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }
}

// Limits of the tile's rows inside one key/value block; false where no column is kept.
template <class C>
RINGSPAN_INLINE bool begin_tile(const BackwardWave& wave, BackwardBlock<C>& b, const TileRows& rows, int64_t q_begin,
                                int64_t kv_begin) {
  const int64_t kv_end = smaller(kv_begin + b.cols, wave.kv_end);
  if (rows.col_begin >= kv_end || rows.col_end <= kv_begin) return false;
  b.row_begin = rows.row_begin - q_begin;
  b.row_end = rows.row_end - q_begin;
  const int64_t group_end = round_up(b.row_end, C::kRows);
  for (int64_t r = b.row_begin / C::kRows * C::kRows; r < group_end; ++r) b.s.first[r] = b.s.last[r] = 0;
  kernel::fill_row_limits(*rows.tile, rows.row_begin, b.row_end - b.row_begin, kv_begin, kv_end,
                          b.s.first + b.row_begin, b.s.last + b.row_begin);
  const int64_t col_begin = b.s.first[b.row_begin], col_end = b.s.last[b.row_end - 1];
  if (col_begin >= col_end) return false;
  b.group_begin = col_begin / C::kRows * C::kRows;
  b.group_end = round_up(col_end, C::kRows);
  b.zero_begin = b.group_begin / C::kCols * C::kCols;
  b.zero_end = round_up(b.group_end, C::kCols);
  return true;
}

template <class C>
void backward_run(const BackwardWave& wave, const BackwardJob& job, Byte* memory) {
  const PackedDims<C> qk(wave.q.dim), v(wave.v.dim);
  Carver carver(memory);
  const BackwardScratch<C> s(carver, qk, v, wave.sizes.block_kv);
  const int64_t batch = (wave.first_group + job.group) / wave.kv_heads;
  const int64_t kv_head = (wave.first_group + job.group) % wave.kv_heads;
  const int64_t kv_begin = wave.kv_begin + job.kv_block * wave.sizes.block_kv;
  BackwardBlock<C> b{s, query_block<C>(wave, job.group, wave.head_begin, 0), kv_sums<C>(wave, job.group, job.kv_block),
                     qk, v, wave.sizes.block_kv, false, static_cast<typename C::Acc>(wave.scale),
                     0, 0, 0, 0, 0, 0};
  Carver sums(reinterpret_cast<Byte*>(b.sums.dk));
  KvSums<C>(sums, qk, v, b.cols);
  __builtin_memset(b.sums.dk, 0, static_cast<std::size_t>(sums.bytes()));
  if (job.num_steps == 0) return;
  RowRange range{&wave.k, batch, kv_head, kv_begin, wave.kv_end, wave.tiles.kv_covered + batch * wave.tiles.kv_len};
  pack_columns<C>(s.k_columns, range, b.cols, s.rows);
  b.k_nonfinite = pack_stacked_block<C>(s.k_stacked, range, b.cols, s.rows);
  range.view = &wave.v;
  pack_columns<C>(s.v_columns, range, b.cols, s.rows);
  for (int64_t head = wave.head_begin; head < wave.head_end; ++head) {
    for (int64_t i = 0; i < job.num_steps; ++i) {
      const BackwardStep& step = job.steps[i];
      b.q = query_block<C>(wave, job.group, head, step.q_block);
      uint32_t* turns = wave.turns + query_index<C>(wave, job.group, head, step.q_block);
      const int64_t q_begin = wave.q_begin + step.q_block * kBackwardRows;
      const int64_t list = batch * wave.tiles.num_q_blocks + q_begin / kBackwardRows;
      bool my_turn = false;
      for (int64_t t = wave.tiles.start[list]; t < wave.tiles.start[list + 1]; ++t) {
        if (!begin_tile(wave, b, wave.tiles.rows[t], q_begin, kv_begin)) continue;
        fill_scores(b);
        add_kv_sums(b);
        if (!my_turn) wait_for_turn(turns, step.turn);
        my_turn = true;
        b.k_nonfinite ? add_q_sums<C, true>(b) : add_q_sums<C, false>(b);
      }
      if (!my_turn) wait_for_turn(turns, step.turn);
      __atomic_store_n(turns, step.turn + 1, __ATOMIC_RELEASE);
    }
  }
}

template <class C>
RINGSPAN_INLINE void write_row(const RawView& view, Byte* target, typename C::Acc* row, bool overwrite) {
  if (overwrite) {
    scatter_row(view, target, row);
  } else {
    add_row(view, target, row);
  }
}

template <class C>
void backward_write_q(const BackwardWave& wave, int64_t group, int64_t head, int64_t q_block) {
  using Acc = typename C::Acc;
  alignas(64) Acc row[kMaxDim];
  const int64_t batch = (wave.first_group + group) / wave.kv_heads;
  const int64_t q_head = (wave.first_group + group) % wave.kv_heads * wave.heads_per_kv + head;
  const QueryBlock<C> block = query_block<C>(wave, group, head, q_block);
  const PackedDims<C> qk(wave.q.dim);
  const int64_t begin = wave.q_begin + q_block * kBackwardRows;
  const int64_t count = smaller(kBackwardRows, wave.q_end - begin);
  for (int64_t r = 0; r < count; ++r) {
    gather_row<C>(row, block.dq + r * C::kCols, qk.panels, QueryBlock<C>::kRowPanelStride,
                  static_cast<Acc>(wave.scale));
    write_row<C>(wave.dq, row_of(wave.dq, batch, q_head, begin + r), row, wave.dq_overwrite);
  }
}

template <class C>
void backward_write_kv(const BackwardWave& wave, int64_t group, int64_t kv_block) {
  using Acc = typename C::Acc;
  alignas(64) Acc row[kMaxDim];
  const int64_t batch = (wave.first_group + group) / wave.kv_heads;
  const int64_t kv_head = (wave.first_group + group) % wave.kv_heads;
  const KvSums<C> sums = kv_sums<C>(wave, group, kv_block);
  const PackedDims<C> qk(wave.q.dim), v(wave.v.dim);
  const int64_t panel_stride = wave.sizes.block_kv * C::kCols;
  const int64_t begin = wave.kv_begin + kv_block * wave.sizes.block_kv;
  const int64_t count = smaller(wave.sizes.block_kv, wave.kv_end - begin);
  // A packed q already holds the scale.
  const Acc dk_factor = C::kScaleOnPack ? Acc{1} : static_cast<Acc>(wave.scale);
  for (int64_t r = 0; r < count; ++r) {
    gather_row<C>(row, sums.dk + r * C::kCols, qk.panels, panel_stride, dk_factor);
    write_row<C>(wave.dk, row_of(wave.dk, batch, kv_head, begin + r), row, wave.dkv_overwrite);
    gather_row<C>(row, sums.dv + r * C::kCols, v.panels, panel_stride, Acc{1});
    write_row<C>(wave.dv, row_of(wave.dv, batch, kv_head, begin + r), row, wave.dkv_overwrite);
  }
}

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
