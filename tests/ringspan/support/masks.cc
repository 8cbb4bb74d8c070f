#include "tests/ringspan/support/masks.h"

#include <algorithm>
#include <stdexcept>

namespace ringspan::test {
namespace {

constexpr int64_t kOpen = int64_t{1} << 60;

struct Rows {
  int64_t begin = 0, count = 0;
};

Tile tile_of(int64_t batch, const Rows& q, const Rows& kv, int64_t lo = -kOpen, int64_t hi = kOpen) {
  return {.batch = batch,
          .q_row0 = q.begin,
          .q_rows = q.count,
          .q_pos0 = q.begin,
          .q_stride = 1,
          .kv_row0 = kv.begin,
          .kv_rows = kv.count,
          .kv_pos0 = kv.begin,
          .kv_stride = 1,
          .lo = lo,
          .hi = hi};
}

// One tile over everything for each batch entry.
std::vector<Tile> band_tiles(int64_t batch, int64_t q_len, int64_t kv_len, Tile band) {
  std::vector<Tile> tiles;
  for (int64_t b = 0; b < batch; ++b) {
    band.batch = b;
    band.q_rows = q_len;
    band.kv_rows = kv_len;
    tiles.push_back(band);
  }
  return tiles;
}

Mask window_mask(int64_t batch, int64_t q_len, int64_t kv_len) {
  Mask mask{[](int64_t, int64_t i, int64_t j) { return i - 5 <= j && j <= i + 3; },
            band_tiles(batch, q_len, kv_len, {.lo = -5, .hi = 3})};
  mask.tiles.push_back(tile_of(0, {0, q_len}, {0, kv_len}, kv_len, kOpen));
  return mask;
}

Mask shifted_mask(int64_t batch, int64_t q_len, int64_t kv_len) {
  return {[](int64_t, int64_t i, int64_t j) { return -60 <= j + 37 - i && j + 37 - i <= 90; },
          band_tiles(batch, q_len, kv_len, {.q_pos0 = 100000, .kv_pos0 = 100037, .lo = -60, .hi = 90})};
}

Mask strided_mask(int64_t batch, int64_t q_len, int64_t kv_len) {
  return {[](int64_t, int64_t i, int64_t j) { return 1 + 2 * j <= 2 + 3 * i && 1 + 2 * j >= 2 + 3 * i - 200; },
          band_tiles(batch, q_len, kv_len,
                     {.q_pos0 = 2, .q_stride = 3, .kv_pos0 = 1, .kv_stride = 2, .lo = -200, .hi = 0})};
}

// Documents of batch entry b: lengths from a fixed list, until less than an eighth of the rows is left.
std::vector<int64_t> document_lengths(int64_t b, int64_t length) {
  constexpr int64_t kLengths[] = {3, 1, 70, 5, 33, 2, 8, 17};
  std::vector<int64_t> lengths;
  int64_t begin = 0;
  for (int64_t n = b; begin < length - length / 8; ++n) {
    lengths.push_back(std::min(kLengths[n % 8], length - begin));
    begin += lengths.back();
  }
  return lengths;
}

Mask document_mask(int64_t batch, int64_t q_len, int64_t kv_len) {
  const int64_t length = std::min(q_len, kv_len);
  Mask mask;
  std::vector<std::vector<int64_t>> ids(static_cast<std::size_t>(batch));
  for (int64_t b = 0; b < batch; ++b) {
    int64_t begin = 0;
    for (const int64_t rows : document_lengths(b, length)) {
      mask.tiles.push_back(tile_of(b, {begin, rows}, {begin, rows}, -kOpen, 0));
      ids[static_cast<std::size_t>(b)].insert(ids[static_cast<std::size_t>(b)].end(), static_cast<std::size_t>(rows),
                                              begin);
      begin += rows;
    }
  }
  mask.keep = [ids](int64_t b, int64_t i, int64_t j) {
    const std::vector<int64_t>& id = ids[static_cast<std::size_t>(b)];
    const auto end = static_cast<int64_t>(id.size());
    return j <= i && i < end && j < end && id[static_cast<std::size_t>(i)] == id[static_cast<std::size_t>(j)];
  };
  return mask;
}

Mask partial_mask(int64_t batch, int64_t q_len, int64_t kv_len) {
  const int64_t q_begin = q_len / 4, q_end = q_len - q_len / 4, kv_begin = kv_len / 3, kv_end = kv_len - kv_len / 5;
  Mask mask;
  for (int64_t b = 0; b < batch; ++b) {
    mask.tiles.push_back(tile_of(b, {q_begin, q_end - q_begin}, {kv_begin, kv_end - kv_begin}, -kOpen, 0));
  }
  mask.keep = [=](int64_t, int64_t i, int64_t j) {
    return q_begin <= i && i < q_end && kv_begin <= j && j < kv_end && j <= i;
  };
  return mask;
}

// Local rows [0, half) hold positions from 0 on, the others hold positions from 3 * (longer half) on; causal.
Mask split_mask(int64_t batch, int64_t q_len, int64_t kv_len) {
  const int64_t q_half = q_len / 2, kv_half = kv_len / 2;
  const int64_t tail = 3 * std::max(q_len - q_half, kv_len - kv_half);
  Mask mask;
  for (int64_t b = 0; b < batch; ++b) {
    for (const bool q_tail : {false, true}) {
      for (const bool kv_tail : {false, true}) {
        const Rows q = q_tail ? Rows{q_half, q_len - q_half} : Rows{0, q_half};
        const Rows kv = kv_tail ? Rows{kv_half, kv_len - kv_half} : Rows{0, kv_half};
        Tile tile = tile_of(b, q, kv, -kOpen, 0);
        tile.q_pos0 = q_tail ? tail : 0;
        tile.kv_pos0 = kv_tail ? tail : 0;
        if (tile.q_rows > 0 && tile.kv_rows > 0) mask.tiles.push_back(tile);
      }
    }
  }
  mask.keep = [=](int64_t, int64_t i, int64_t j) {
    const int64_t q_position = i < q_half ? i : tail + i - q_half;
    const int64_t kv_position = j < kv_half ? j : tail + j - kv_half;
    return kv_position <= q_position;
  };
  return mask;
}

// Keys 0..6, 7..13, ... of a row are kept or not by the toss of a coin.
bool toss(int64_t b, int64_t i, int64_t j) {
  uint64_t x = static_cast<uint64_t>((b * 1009 + i) * 1013 + j / 7) * 0x9E3779B97F4A7C15u;
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93u;
  return ((x >> 40) & 3) == 0;
}

std::vector<std::vector<bool>> no_rows(int64_t batch, int64_t length) {
  return std::vector<std::vector<bool>>(static_cast<std::size_t>(batch),
                                        std::vector<bool>(static_cast<std::size_t>(length), false));
}

}  // namespace

const char* name_of(MaskKind kind) {
  constexpr const char* kNames[] = {"full",      "causal",  "bottom_right", "window", "shifted",
                                    "documents", "strided", "partial",      "split",  "scattered"};
  return kNames[static_cast<int>(kind)];
}

Mask make_mask(MaskKind kind, int64_t batch, int64_t q_len, int64_t kv_len) {
  switch (kind) {
    case MaskKind::kFull:
      return {[](int64_t, int64_t, int64_t) { return true; },
              band_tiles(batch, q_len, kv_len, {.lo = -kOpen, .hi = kOpen})};
    case MaskKind::kCausal:
      return {[](int64_t, int64_t i, int64_t j) { return j <= i; },
              band_tiles(batch, q_len, kv_len, {.lo = -kOpen, .hi = 0})};
    case MaskKind::kBottomRight:
      return {[=](int64_t, int64_t i, int64_t j) { return j <= i + kv_len - q_len; },
              band_tiles(batch, q_len, kv_len, {.q_pos0 = kv_len, .kv_pos0 = q_len, .lo = -kOpen, .hi = 0})};
    case MaskKind::kWindow: return window_mask(batch, q_len, kv_len);
    case MaskKind::kShifted: return shifted_mask(batch, q_len, kv_len);
    case MaskKind::kDocuments: return document_mask(batch, q_len, kv_len);
    case MaskKind::kStrided: return strided_mask(batch, q_len, kv_len);
    case MaskKind::kPartial: return partial_mask(batch, q_len, kv_len);
    case MaskKind::kSplit: return split_mask(batch, q_len, kv_len);
    case MaskKind::kScattered: return {toss, brute_force_tiles(toss, batch, q_len, kv_len)};
  }
  throw std::logic_error("unknown mask");
}

std::vector<Tile> brute_force_tiles(const Keep& keep, int64_t batch, int64_t q_len, int64_t kv_len) {
  std::vector<Tile> tiles;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < q_len; ++i) {
      for (int64_t begin = 0; begin < kv_len; ++begin) {
        int64_t end = begin;
        while (end < kv_len && keep(b, i, end)) ++end;
        if (end > begin) tiles.push_back(tile_of(b, {i, 1}, {begin, end - begin}));
        begin = end;
      }
    }
  }
  return tiles;
}

std::vector<Tile> cut_tiles(const std::vector<Tile>& tiles, int64_t kv_begin, int64_t kv_end) {
  std::vector<Tile> parts;
  for (Tile tile : tiles) {
    const int64_t begin = std::max(tile.kv_row0, kv_begin), end = std::min(tile.kv_row0 + tile.kv_rows, kv_end);
    if (begin >= end) continue;
    tile.kv_pos0 += (begin - tile.kv_row0) * tile.kv_stride;
    tile.kv_row0 = begin;
    tile.kv_rows = end - begin;
    parts.push_back(tile);
  }
  return parts;
}

std::vector<std::vector<bool>> covered_q_rows(const std::vector<Tile>& tiles, int64_t batch, int64_t q_len) {
  std::vector<std::vector<bool>> covered = no_rows(batch, q_len);
  for (const Tile& tile : tiles) {
    for (int64_t a = 0; a < tile.q_rows; ++a) {
      covered[static_cast<std::size_t>(tile.batch)][static_cast<std::size_t>(tile.q_row0 + a)] = true;
    }
  }
  return covered;
}

std::vector<std::vector<bool>> covered_kv_rows(const std::vector<Tile>& tiles, int64_t batch, int64_t kv_len) {
  std::vector<std::vector<bool>> covered = no_rows(batch, kv_len);
  for (const Tile& tile : tiles) {
    for (int64_t c = 0; c < tile.kv_rows; ++c) {
      covered[static_cast<std::size_t>(tile.batch)][static_cast<std::size_t>(tile.kv_row0 + c)] = true;
    }
  }
  return covered;
}

}  // namespace ringspan::test
