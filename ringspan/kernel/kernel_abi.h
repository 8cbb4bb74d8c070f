// What crosses between the planning code and the kernels that are compiled once per instruction set: plain structs of
// pointers and integers, and one table of functions. No inline function, no standard container, no member
// initialiser may enter this header: whatever it brought along would be compiled with the flags of each instruction
// set under one name, and the linker may then keep the copy that this CPU cannot run.
//
// Blocks. Query rows are cut into blocks of `block_q`, key/value rows into blocks of `block_kv`, both counted from
// row 0 of the tensors. A `wave` is the part of a call whose packed operands fit into the workspace at one time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ringspan/kernel/pair_grid.h"
#include "ringspan/kernel/pair_numbers.h"
#include "ringspan/shape/head_dim.h"

namespace ringspan {

struct Tile;

namespace kernel {

enum class Element : uint8_t { kF32, kBF16, kF16, kF64 };  // the same order as DType

// A strided tensor; strides in bytes. A null `data` is an absent one, or one without elements
// (raw_view in call_support.cc says why these need not be told apart).
struct RawView {
  unsigned char* data;
  int64_t stride[4];  // batch, head, row, dim
  int64_t dim;
  Element element;
};

// The rows of one tile that lie in one q block.
struct TileRows {
  const Tile* tile;
  int64_t row_begin, row_end;  // rows of the tensor
  int64_t col_begin, col_end;  // every key/value row that one of them keeps lies in here
};

// What the kernels need of the tiles, see tile_index.h.
struct TileLists {
  const TileRows* rows;  // of q block i of batch entry b: [start[b * num_q_blocks + i], start[... + 1])
  const int64_t* start;
  int64_t num_q_blocks;
  const uint8_t* q_covered;   // [batch, q_len]: 1 where a tile covers the row
  const uint8_t* kv_covered;  // [batch, kv_len]
  int64_t q_len, kv_len;
};

// Key/value rows [begin, end).
struct KvRange {
  int64_t begin, end;
};

// Columns that rows [row, row + count) of the tensor keep, as [first, last) relative to kv.begin and clamped to
// [0, kv.end - kv.begin]. Both ends never move left from row to row. Not inline: see above.
void fill_row_limits(const Tile& tile, int64_t row, int64_t count, KvRange kv, int32_t* first, int32_t* last) noexcept;

// How a tile's rows and columns count: the first of each, its position, positions from one to the next; see tile.h.
struct TileAxes {
  int64_t q_row0, q_pos0, q_stride;
  int64_t kv_row0, kv_pos0, kv_stride;
};
TileAxes axes_of(const Tile& tile) noexcept;

// PairInputs as kernels read them.
struct PairRule {
  int32_t changes_scores, drops;
  int32_t scales_gradients;  // a number is given, and so dS has a factor for each pair
  PairNumbers numbers;
  RawView bias;
  double bias_factor;
  RawView mask;  // bytes; `element` means nothing
  int32_t mask_value, mask_by_grid;
  RawView slopes;
  int64_t slope_shift;
  int32_t slope_of_root;
  uint32_t threshold;  // a draw below it keeps its pair
  uint64_t seed, offset;
  double rescale;  // 1 / (1 - p); 1 without dropout
  const PairGrid* grids;
  int64_t num_grids;
};

// ---------------------------------------------------------------------------------------------------------- forward

struct ForwardSizes {
  int64_t block_q, block_kv;
  int64_t panel_kv;                      // block_kv is a multiple; rows are packed in multiples of it
  int64_t k_block_bytes, v_block_bytes;  // packed K and V of one block
  int64_t partial_bytes;                 // unfinished state of one job
  int64_t scratch_bytes;                 // per worker
};

constexpr int64_t kCacheLine = 64;

// Rows of tensors that a worker will soon read: fetched into its cache while it computes, a few cache lines beside
// every register tile of scores. (All at once they fill the processor's queue of misses, and it waits.)
struct AheadRows {
  const unsigned char* next;
  int64_t stride, bytes;  // of a row
  int64_t count;          // rows that are left
};
struct Ahead {
  AheadRows q, k, v;  // one after the other
  int64_t lines_per_tile;
};

// Query block `q_block` of one head against key/value rows [kv_begin, kv_end) of the wave.
struct ForwardJob {
  int64_t batch, head, q_block;
  int64_t kv_begin, kv_end;
  unsigned char* partial;  // where the state goes; null = the job is alone and ends its rows itself
  Ahead* ahead;            // may be null
};

// The parts of one q block, joined in ascending order.
struct MergeJob {
  int64_t batch, head, q_block;
  const unsigned char* partials;
  int64_t num_partials;
};

struct ForwardWave {
  RawView q, k, v;
  RawView state_max, state_sum, state_acc;  // the running state
  RawView out, out_max, out_sum, out_lse;
  RawView sink;  // one value per head; absent = none. Joins where the rows end.
  PairRule pairs;
  double scale;
  int64_t heads_per_kv, kv_heads;
  int64_t first_group;                 // group = batch entry * kv_heads + kv head
  int64_t kv_begin, kv_end;            // kv_begin is a multiple of block_kv
  int64_t blocks_per_group;            // slots; block i lies in slot i % blocks_per_group
  unsigned char *packed_k, *packed_v;  // [group][slot]
  uint8_t* v_nonfinite;                // [group][slot]
  unsigned char* partials;
  int32_t load, finish;  // the state goes on from earlier; the rows end here
  TileLists tiles;
  ForwardSizes sizes;
};

// --------------------------------------------------------------------------------------------------------- few rows

// A handful of query rows per key/value head (decoding): keys and values are read once, in place, for all of them.
// Such a call is a ForwardWave without packed operands.
struct DecodeSizes {
  int64_t partial_bytes, scratch_bytes;
};

// Key/value rows [kv_begin, kv_end) of one head, for all query rows of its group.
struct DecodeJob {
  int64_t batch, kv_head;
  int64_t kv_begin, kv_end;
  unsigned char* partial;
};

struct DecodeMerge {
  int64_t batch, kv_head;
  const unsigned char* partials;
  int64_t num_partials;
};

// --------------------------------------------------------------------------------------------------------- backward

struct BackwardSizes {
  int64_t block_q, block_kv;
  int64_t q_block_bytes;   // packed Q, dO, statistics and the dQ sum of one block of one head
  int64_t kv_block_bytes;  // the dK and dV sums of one block
  int64_t scratch_bytes;   // per worker
};

// One q block that a key/value block meets. `turn` = how many blocks of the wave add to its dQ before.
struct BackwardStep {
  int64_t q_block;  // counted inside the wave
  uint32_t turn;
  int32_t is_last;  // of the turns
};

// Of a q block in the wave's memory: packed by the first job that meets it.
struct QueryProgress {
  uint32_t packed;  // 0 not begun, 1 in work, 2 packed
  uint32_t turn;    // how many blocks of keys have added to dQ
};

struct BackwardJob {
  int64_t group, kv_block;  // both counted inside the wave
  const BackwardStep* steps;
  int64_t num_steps;
};

struct BackwardWave {
  RawView q, k, v, dout, lse, delta;
  RawView dq, dk, dv;
  PairRule pairs;
  RawView dbias;  // added to; absent = not asked for
  double scale;
  int64_t heads_per_kv, kv_heads;
  int64_t first_group;
  int64_t head_begin, head_end;              // query heads of each group in this wave, inside [0, heads_per_kv)
  int64_t q_begin, q_end, kv_begin, kv_end;  // begins are multiples of the block sizes
  int64_t q_blocks, kv_blocks;               // of the wave
  unsigned char* packed_q;                   // [group][head][q block]
  QueryProgress* progress;                   // [group][head][q block]
  unsigned char* sums_kv;                    // [group][kv block]; unless writes_at_once
  int32_t writes_at_once;                    // gradients go out as soon as they are complete, else by backward_write_*
  int32_t wants_dq, wants_dkv;
  int32_t dq_overwrite, dkv_overwrite;
  TileLists tiles;
  BackwardSizes sizes;
};

struct RowDelta {
  RawView out, dout, dlse, delta;
};

// ------------------------------------------------------------------------------------------------------------ table

// One per instruction set and compute type. No function of it throws, allocates, or touches memory that its arguments
// do not lead to.
struct KernelTable {
  void (*forward_sizes)(int64_t qk_dim, int64_t v_dim, ForwardSizes* sizes);
  // Rows of one block, counted from its first: whole panels. Returns whether V holds an inf or NaN there.
  bool (*forward_pack)(const ForwardWave& wave, int64_t group, int64_t block, KvRange rows, unsigned char* scratch);
  void (*forward_run)(const ForwardWave& wave, const ForwardJob& job, unsigned char* scratch);
  void (*forward_merge)(const ForwardWave& wave, const MergeJob& job, unsigned char* scratch);
  void (*decode_sizes)(int64_t rows, int64_t qk_dim, int64_t v_dim, DecodeSizes* sizes);
  void (*decode_run)(const ForwardWave& wave, const DecodeJob& job, unsigned char* scratch);
  void (*decode_merge)(const ForwardWave& wave, const DecodeMerge& job, unsigned char* scratch);
  void (*backward_sizes)(int64_t qk_dim, int64_t v_dim, BackwardSizes* sizes);
  void (*backward_run)(const BackwardWave& wave, const BackwardJob& job, unsigned char* scratch);
  void (*backward_write_q)(const BackwardWave& wave, int64_t group, int64_t head, int64_t q_block);
  void (*backward_write_kv)(const BackwardWave& wave, int64_t group, int64_t kv_block);
  void (*row_delta)(const RowDelta& args, int64_t batch, int64_t head, int64_t row_begin, int64_t row_end);
};

// `bf16` is null where the set has no dot product of bf16 pairs; bf16 is then widened to fp32 on packing.
struct IsaKernels {
  const KernelTable *f32, *f64, *bf16;
};

}  // namespace kernel

namespace generic {
kernel::IsaKernels kernels();
}
#ifdef RINGSPAN_ISA_X86
namespace avx2 {
kernel::IsaKernels kernels();
}
#endif
#ifdef RINGSPAN_ISA_AVX512
namespace avx512 {
kernel::IsaKernels kernels();
}
namespace avx512_bf16 {
kernel::IsaKernels kernels();
}
#endif

}  // namespace ringspan
