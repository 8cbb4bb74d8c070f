// TileIndex: the tiles of a call, sorted by the query blocks that they touch, so that a job finds its own without
// looking at all of them (packed documents give thousands of tiny tiles).
//
//      q block 0 | A A B B |      rows of block 0: A, B          covered rows of q: union of the tiles' q ranges,
//      q block 1 | B B . C |      rows of block 1: B, C          of kv: union of their kv ranges
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ringspan/kernel/kernel_abi.h"
#include "ringspan/mask/tile.h"

namespace ringspan::kernel {

class TileIndex {
 public:
  // `tiles` must outlive the index. Error where a tile leaves the tensors. Cost: tiles x blocks that each touches, plus
  // one byte per row.
  TileIndex(std::span<const Tile> tiles, int64_t batch, int64_t q_len, int64_t kv_len, int64_t block_q);

  int64_t num_q_blocks() const { return num_q_blocks_; }
  std::span<const TileRows> rows_of(int64_t batch, int64_t q_block) const {
    const int64_t list = batch * num_q_blocks_ + q_block;
    return std::span(rows_).subspan(start_[list], start_[list + 1] - start_[list]);
  }
  TileLists lists() const;

 private:
  void sort_into_blocks(std::span<const Tile> tiles, int64_t batch, int64_t block_q);

  int64_t q_len_, kv_len_, num_q_blocks_;
  std::vector<TileRows> rows_;
  std::vector<int64_t> start_;
  std::vector<uint8_t> q_covered_, kv_covered_;
};

}  // namespace ringspan::kernel
