#include "ringspan/kernel/tile_index.h"

#include <algorithm>

#include "ringspan/base/error.h"

namespace ringspan::kernel {
namespace {

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// Ends of a row's columns in the tile, not yet clamped; both never move left from row to row.
struct Ends {
  int64_t begin, end;
};
Ends ends_of(const Tile& tile, int64_t row) {
  const int64_t shift = tile.q_pos0 + row * tile.q_stride - tile.kv_pos0;
  return {-floor_div(-(tile.lo + shift), tile.kv_stride), floor_div(tile.hi + shift, tile.kv_stride) + 1};
}

void check_inside(const Tile& tile, int64_t batch, int64_t q_len, int64_t kv_len) {
  RINGSPAN_CHECK(tile.batch >= 0 && tile.batch < batch, "a tile names batch entry ", tile.batch, " of ", batch);
  RINGSPAN_CHECK(tile.q_rows >= 0 && tile.q_row0 >= 0 && tile.q_row0 + tile.q_rows <= q_len,
                 "a tile covers query rows ", tile.q_row0, " to ", tile.q_row0 + tile.q_rows, " of ", q_len);
  RINGSPAN_CHECK(tile.kv_rows >= 0 && tile.kv_row0 >= 0 && tile.kv_row0 + tile.kv_rows <= kv_len,
                 "a tile covers key rows ", tile.kv_row0, " to ", tile.kv_row0 + tile.kv_rows, " of ", kv_len);
  RINGSPAN_CHECK(tile.q_stride >= 1 && tile.kv_stride >= 1, "a tile has strides ", tile.q_stride, " and ",
                 tile.kv_stride, "; both must be at least 1");
}

// 1 for rows inside at least one of the ranges: counts of begins and ends, summed up.
std::vector<uint8_t> mark_covered(const std::vector<int64_t>& changes, int64_t batch, int64_t len) {
  std::vector<uint8_t> covered(batch * len);
  for (int64_t b = 0; b < batch; ++b) {
    int64_t open = 0;
    for (int64_t i = 0; i < len; ++i) {
      open += changes[b * (len + 1) + i];
      covered[b * len + i] = open > 0;
    }
  }
  return covered;
}

}  // namespace

TileAxes axes_of(const Tile& tile) noexcept {
  return {tile.q_row0, tile.q_pos0, tile.q_stride, tile.kv_row0, tile.kv_pos0, tile.kv_stride};
}

void fill_row_limits(const Tile& tile, int64_t row, int64_t count, KvRange kv, int32_t* first, int32_t* last) noexcept {
  const int64_t tile_row = row - tile.q_row0;
  const int64_t low = std::max(tile.kv_row0, kv.begin);
  const int64_t high = std::max(low, std::min(tile.kv_row0 + tile.kv_rows, kv.end));
  const bool equal_strides = tile.q_stride == tile.kv_stride;
  const Ends base = ends_of(tile, tile_row);
  for (int64_t i = 0; i < count; ++i) {
    // With equal strides the ends move by one column per row.
    const Ends ends = equal_strides ? Ends{base.begin + i, base.end + i} : ends_of(tile, tile_row + i);
    first[i] = static_cast<int32_t>(std::clamp(tile.kv_row0 + ends.begin, low, high) - kv.begin);
    last[i] = static_cast<int32_t>(std::clamp(tile.kv_row0 + ends.end, low, high) - kv.begin);
  }
}

TileIndex::TileIndex(std::span<const Tile> tiles, int64_t batch, int64_t q_len, int64_t kv_len, int64_t block_q)
    : q_len_(q_len), kv_len_(kv_len), num_q_blocks_((q_len + block_q - 1) / block_q) {
  std::vector<int64_t> q_changes(batch * (q_len + 1)), kv_changes(batch * (kv_len + 1));
  for (const Tile& tile : tiles) {
    check_inside(tile, batch, q_len, kv_len);
    if (tile.q_rows == 0 || tile.kv_rows == 0) continue;
    q_changes[tile.batch * (q_len + 1) + tile.q_row0] += 1;
    q_changes[tile.batch * (q_len + 1) + tile.q_row0 + tile.q_rows] -= 1;
    kv_changes[tile.batch * (kv_len + 1) + tile.kv_row0] += 1;
    kv_changes[tile.batch * (kv_len + 1) + tile.kv_row0 + tile.kv_rows] -= 1;
  }
  q_covered_ = mark_covered(q_changes, batch, q_len);
  kv_covered_ = mark_covered(kv_changes, batch, kv_len);
  sort_into_blocks(tiles, batch, block_q);
}

void TileIndex::sort_into_blocks(std::span<const Tile> tiles, int64_t batch, int64_t block_q) {
  const auto for_each_part = [&](auto&& visit) {
    for (const Tile& tile : tiles) {
      const int64_t q_end = tile.q_row0 + tile.q_rows;
      for (int64_t block = tile.q_row0 / block_q; block * block_q < q_end; ++block) {
        const int64_t row_begin = std::max(block * block_q, tile.q_row0);
        const int64_t row_end = std::min((block + 1) * block_q, q_end);
        if (row_begin >= row_end) continue;
        const int64_t low = ends_of(tile, row_begin - tile.q_row0).begin;
        const int64_t high = ends_of(tile, row_end - 1 - tile.q_row0).end;
        const int64_t col_begin = tile.kv_row0 + std::clamp<int64_t>(low, 0, tile.kv_rows);
        const int64_t col_end = tile.kv_row0 + std::clamp<int64_t>(high, 0, tile.kv_rows);
        if (col_begin >= col_end) continue;
        visit(tile.batch * num_q_blocks_ + block, TileRows{&tile, row_begin, row_end, col_begin, col_end});
      }
    }
  };
  start_.assign(batch * num_q_blocks_ + 1, 0);
  for_each_part([&](int64_t list, const TileRows&) { ++start_[list + 1]; });
  for (std::size_t i = 1; i < start_.size(); ++i) start_[i] += start_[i - 1];
  rows_.resize(start_.back());
  std::vector<int64_t> next(start_.begin(), start_.end() - 1);
  for_each_part([&](int64_t list, const TileRows& rows) { rows_[next[list]++] = rows; });
}

TileLists TileIndex::lists() const {
  return {rows_.data(), start_.data(), num_q_blocks_, q_covered_.data(), kv_covered_.data(), q_len_, kv_len_};
}

}  // namespace ringspan::kernel
