// Backward: one job = one block of keys and values of one key/value head against every query block that meets it.
//
//     P  = e^(S - lse)           S = Q K^T scaled, lse of the whole row: no maximum is searched
//     dS = P (dP - delta)        dP = dO V^T, in the same register tile as P
//     dV += P^T dO,  dK += dS^T Q,  dQ += dS K
//
// dQ of a q block gets a sum from many jobs. They add in ascending order of key/value block, each waiting for its turn,
// so the bits don't depend on the number of threads. Jobs are claimed in ascending order, so the one that a job waits
// for has begun: no deadlock.
//
//     thread 0   kv block 0:  q0  q1  q2  q3 ...
//     thread 1   kv block 1:      q0  q1  q2 ...      one step behind, after the first wait
//
// The first job that meets a q block packs it. Where gradients may be touched at once, the job whose turn is the last
// writes dQ of the block, and each job its dK and dV when it ends, while they are in the cache.
//
// Legend: as in forward-inl.h; dO gradient of out; delta = sum(out dO) - dlse of a row.
#pragma once

#include <sched.h>

#include "ringspan/kernel/backward_block-inl.h"

namespace ringspan::RINGSPAN_ISA_NAMESPACE {

using kernel::BackwardJob;
using kernel::BackwardSizes;
using kernel::BackwardStep;
using kernel::BackwardWave;
using kernel::QueryProgress;
using kernel::TileRows;

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
// In the wave's memory, or behind the scratch in `memory`, the worker's, from where the job writes them at once.
template <class C>
RINGSPAN_INLINE KvSums<C> kv_sums(const BackwardWave& wave, int64_t group, int64_t kv_block, Byte* memory) {
  const int64_t index = group * wave.kv_blocks + kv_block;
  Carver carver(wave.writes_at_once ? memory + wave.sizes.scratch_bytes
                                    : wave.sums_kv + index * wave.sizes.kv_block_bytes);
  return KvSums<C>(carver, PackedDims<C>(wave.q.dim), PackedDims<C>(wave.v.dim), wave.sizes.block_kv);
}

// Row panels (times `factor`) and stacked panels of `range`. Returns whether inf or NaN was found.
template <class C>
RINGSPAN_INLINE bool pack_both_forms(typename C::Word* row_panels, typename C::Word* stacked, const PackRows& range,
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
RINGSPAN_INLINE void clear_q_sums(const QueryBlock<C>& block, const PackedDims<C>& qk) {
  const int64_t count = qk.panels * QueryBlock<C>::kRowPanelStride;
  __builtin_memset(block.dq, 0, static_cast<std::size_t>(count) * sizeof(typename C::Acc));
}

template <class C>
void pack_query_block(const BackwardWave& wave, int64_t group, int64_t head, int64_t q_block, typename C::Row* rows) {
  using Acc = typename C::Acc;
  const int64_t batch = (wave.first_group + group) / wave.kv_heads;
  const int64_t q_head = (wave.first_group + group) % wave.kv_heads * wave.heads_per_kv + head;
  const QueryBlock<C> block = query_block<C>(wave, group, head, q_block);
  const PackedDims<C> qk(wave.q.dim);
  const int64_t begin = wave.q_begin + q_block * kBackwardRows;
  PackRows range{&wave.q, batch, q_head, begin, wave.q_end, wave.tiles.q_covered + batch * wave.tiles.q_len};
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
  clear_q_sums(block, qk);
}

RINGSPAN_INLINE void wait_until(const uint32_t* value, uint32_t wanted) {
  constexpr int kSpins = 256;
  for (int spin = 0; __atomic_load_n(value, __ATOMIC_ACQUIRE) != wanted; ++spin) {
    if (spin >= kSpins) {
      sched_yield();
    } else {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }
}

// The q block is packed when this returns, by this worker or by another one.
template <class C>
RINGSPAN_INLINE void pack_once(const BackwardWave& wave, int64_t group, int64_t head, int64_t q_block, uint32_t* packed,
                               typename C::Row* rows) {
  constexpr uint32_t kBegun = 1, kDone = 2;
  uint32_t seen = 0;
  if (__atomic_compare_exchange_n(packed, &seen, kBegun, false, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE)) {
    pack_query_block<C>(wave, group, head, q_block, rows);
    __atomic_store_n(packed, kDone, __ATOMIC_RELEASE);
  } else if (seen != kDone) {
    wait_until(packed, kDone);
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
  kernel::fill_row_limits(*rows.tile, rows.row_begin, b.row_end - b.row_begin, {kv_begin, kv_end},
                          b.s.first + b.row_begin, b.s.last + b.row_begin);
  if (wave.pairs.mask.data) trim_masked(b.pairs, b.row_begin, b.row_end, b.s.first, b.s.last);
  const int64_t col_begin = b.s.first[b.row_begin], col_end = b.s.last[b.row_end - 1];
  if (col_begin >= col_end) return false;
  b.group_begin = col_begin / C::kRows * C::kRows;
  b.group_end = round_up(col_end, C::kRows);
  b.zero_begin = b.group_begin / C::kCols * C::kCols;
  b.zero_end = round_up(b.group_end, C::kCols);
  return true;
}

template <class C>
RINGSPAN_INLINE void clear_sums(const BackwardBlock<C>& b) {
  Carver sums(reinterpret_cast<Byte*>(b.sums.dk));
  KvSums<C>(sums, b.qk, b.v, b.cols);
  __builtin_memset(b.sums.dk, 0, static_cast<std::size_t>(sums.bytes()));
}

// A row of sums, [panel][row][kCols], times `factor`: instead of the row of a gradient, or added to it.
template <class C>
RINGSPAN_INLINE void write_row(const RawView& view, Byte* target, const typename C::Acc* sums, int64_t panel_stride,
                               typename C::Acc factor, bool overwrite) {
  using Acc = typename C::Acc;
  alignas(64) Acc row[kMaxHeadDim];
  gather_row<C>(row, sums, ceil_div(view.dim, C::kCols), panel_stride, factor);
  if (overwrite) {
    scatter_row(view, target, row);
  } else {
    add_row(view, target, row);
  }
}

template <class C>
void backward_write_q(const BackwardWave& wave, int64_t group, int64_t head, int64_t q_block) {
  const int64_t batch = (wave.first_group + group) / wave.kv_heads;
  const int64_t q_head = (wave.first_group + group) % wave.kv_heads * wave.heads_per_kv + head;
  const QueryBlock<C> block = query_block<C>(wave, group, head, q_block);
  const PackedDims<C> qk(wave.q.dim);
  // No key of the wave met the block: its sums were never begun.
  if (wave.progress[query_index<C>(wave, group, head, q_block)].packed == 0) clear_q_sums(block, qk);
  const int64_t begin = wave.q_begin + q_block * kBackwardRows;
  const int64_t count = smaller(kBackwardRows, wave.q_end - begin);
  for (int64_t r = 0; r < count; ++r) {
    write_row<C>(wave.dq, row_of(wave.dq, batch, q_head, begin + r), block.dq + r * C::kCols,
                 QueryBlock<C>::kRowPanelStride, static_cast<typename C::Acc>(wave.scale), wave.dq_overwrite);
  }
}

template <class C>
void write_kv_block(const BackwardWave& wave, int64_t group, int64_t kv_block, const KvSums<C>& sums) {
  using Acc = typename C::Acc;
  const int64_t batch = (wave.first_group + group) / wave.kv_heads;
  const int64_t kv_head = (wave.first_group + group) % wave.kv_heads;
  const int64_t panel_stride = wave.sizes.block_kv * C::kCols;
  const int64_t begin = wave.kv_begin + kv_block * wave.sizes.block_kv;
  const int64_t count = smaller(wave.sizes.block_kv, wave.kv_end - begin);
  // A packed q already holds the scale.
  const Acc dk_factor = C::kScaleOnPack ? Acc{1} : static_cast<Acc>(wave.scale);
  const auto dv_factor = static_cast<Acc>(wave.pairs.rescale);
  for (int64_t r = 0; r < count; ++r) {
    write_row<C>(wave.dk, row_of(wave.dk, batch, kv_head, begin + r), sums.dk + r * C::kCols, panel_stride, dk_factor,
                 wave.dkv_overwrite);
    write_row<C>(wave.dv, row_of(wave.dv, batch, kv_head, begin + r), sums.dv + r * C::kCols, panel_stride, dv_factor,
                 wave.dkv_overwrite);
  }
}

template <class C>
void backward_write_kv(const BackwardWave& wave, int64_t group, int64_t kv_block) {
  write_kv_block(wave, group, kv_block, kv_sums<C>(wave, group, kv_block, nullptr));
}

template <class C>
RINGSPAN_INLINE void pack_kv_block(const BackwardWave& wave, BackwardBlock<C>& b, int64_t kv_head) {
  const int64_t batch = b.pairs.batch;
  PackRows range{&wave.k,        batch,       kv_head,
                 b.pairs.kv_row, wave.kv_end, wave.tiles.kv_covered + batch * wave.tiles.kv_len};
  pack_columns<C>(b.s.k_columns, range, b.cols, b.s.rows);
  if (wave.wants_dq) {
    b.k_nonfinite = pack_stacked_block<C>(b.s.k_stacked, range, b.cols, b.cols / C::kPair * C::kCols, b.s.rows);
  }
  range.view = &wave.v;
  pack_columns<C>(b.s.v_columns, range, b.cols, b.s.rows);
}

// One q block of one head, which is packed: its gradients, and what it adds to those of the job's keys.
template <class C>
RINGSPAN_INLINE void meet_query_block(const BackwardWave& wave, BackwardBlock<C>& b, const BackwardStep& step,
                                      uint32_t* turn) {
  const int64_t q_begin = wave.q_begin + step.q_block * kBackwardRows;
  const int64_t list = b.pairs.batch * wave.tiles.num_q_blocks + q_begin / kBackwardRows;
  b.pairs.q_row = q_begin;
  bool my_turn = false;
  for (int64_t t = wave.tiles.start[list]; t < wave.tiles.start[list + 1]; ++t) {
    b.pairs.axes = kernel::axes_of(*wave.tiles.rows[t].tile);
    if (!begin_tile(wave, b, wave.tiles.rows[t], q_begin, b.pairs.kv_row)) continue;
    fill_scores(b);
    if (wave.wants_dkv) add_kv_sums(b);
    if (!wave.wants_dq) continue;
    if (!my_turn) wait_until(turn, step.turn);
    my_turn = true;
    b.k_nonfinite ? add_q_sums<C, true>(b) : add_q_sums<C, false>(b);
  }
  if (!wave.wants_dq) return;
  if (!my_turn) wait_until(turn, step.turn);
  __atomic_store_n(turn, step.turn + 1, __ATOMIC_RELEASE);
}

template <class C>
void backward_run(const BackwardWave& wave, const BackwardJob& job, Byte* memory) {
  const PackedDims<C> qk(wave.q.dim), v(wave.v.dim);
  Carver carver(memory);
  const BackwardScratch<C> s(carver, qk, v, wave.sizes.block_kv);
  const int64_t batch = (wave.first_group + job.group) / wave.kv_heads;
  const int64_t kv_head = (wave.first_group + job.group) % wave.kv_heads;
  const int64_t kv_begin = wave.kv_begin + job.kv_block * wave.sizes.block_kv;
  BackwardBlock<C> b{s,
                     query_block<C>(wave, job.group, wave.head_begin, 0),
                     kv_sums<C>(wave, job.group, job.kv_block, memory),
                     qk,
                     v,
                     wave.sizes.block_kv,
                     false,
                     static_cast<typename C::Acc>(wave.scale),
                     0,
                     0,
                     0,
                     0,
                     0,
                     0,
                     {rule_at_work(wave.pairs), {}, batch, 0, 0, kv_begin},
                     wave.dbias.data ? &wave.dbias : nullptr};
  if (wave.wants_dkv) clear_sums(b);
  if (job.num_steps > 0) pack_kv_block(wave, b, kv_head);
  for (int64_t head = wave.head_begin; head < wave.head_end; ++head) {
    b.pairs.head = kv_head * wave.heads_per_kv + head;
    for (int64_t i = 0; i < job.num_steps; ++i) {
      const BackwardStep& step = job.steps[i];
      b.q = query_block<C>(wave, job.group, head, step.q_block);
      QueryProgress& progress = wave.progress[query_index<C>(wave, job.group, head, step.q_block)];
      pack_once<C>(wave, job.group, head, step.q_block, &progress.packed, s.rows);
      meet_query_block(wave, b, step, &progress.turn);
      if (wave.wants_dq && wave.writes_at_once && step.is_last) {
        backward_write_q<C>(wave, job.group, head, step.q_block);
      }
    }
  }
  if (wave.wants_dkv && wave.writes_at_once) write_kv_block(wave, job.group, job.kv_block, b.sums);
}

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
