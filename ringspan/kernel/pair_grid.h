// PairGrid: which number a pair has, and how far its key lies from its query. Plain integers, since kernels of every
// instruction set see them.
//
//              kv_begin
//                 |                     index(b, n, i, j) = origin + b batch_stride + n head_stride
//     q_begin --- +----------+                              + (i - q_begin) row_stride + (j - kv_begin)
//                 |  i, j    |          distance(i, j)    = (j - kv_begin) - (i - q_begin)
//                 +----------+
//
// One grid covers a whole call ([B, N, Sq, Skv]); packed documents with an order of their own have one each.
#pragma once

#include <cstdint>

namespace ringspan {

struct PairGrid {
  int64_t q_begin, kv_begin;  // global positions of the grid's first row and column
  // In 64-bit arithmetic without sign: an index may wrap around.
  uint64_t origin, batch_stride, head_stride, row_stride;
};

}  // namespace ringspan
