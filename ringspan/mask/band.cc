#include "ringspan/mask/band.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace ringspan {
namespace {

// Sum of clamp(u, 0, width) over all u <= last.
int64_t sum_clamped(int64_t last, int64_t width) {
  if (last <= 0) return 0;
  if (last <= width) return last * (last + 1) / 2;
  return width * (width + 1) / 2 + (last - width) * width;
}

// Pairs of a rows x columns rectangle with j - i <= limit, counted from its corner.
int64_t count_below(int64_t rows, int64_t columns, int64_t limit) {
  limit = std::clamp(limit, -rows, columns);
  return sum_clamped(limit + rows, columns) - sum_clamped(limit, columns);
}

bool meet(const Band& a, const Band& b) {
  return a.q_begin < b.q_end && b.q_begin < a.q_end && a.kv_begin < b.kv_end && b.kv_begin < a.kv_end && a.lo <= b.hi &&
         b.lo <= a.hi;
}

bool sorts_before(const Band& a, const Band& b) {
  return std::tie(a.q_begin, a.kv_begin, a.q_end, a.kv_end, a.lo, a.hi) <
         std::tie(b.q_begin, b.kv_begin, b.q_end, b.kv_end, b.lo, b.hi);
}

// Drops from `active` the bands that end before `row`: in a sweep over sorted bands nothing can meet them any more.
void retire(std::vector<size_t>& active, const std::vector<Band>& bands, int64_t row) {
  std::erase_if(active, [&](size_t index) { return bands[index].q_end < row; });
}

void drop_empty(std::vector<Band>& bands) {
  std::erase_if(bands, [](const Band& band) { return band == Band{}; });
}

// `band` without those of `bands` that `others` names.
std::vector<Band> rest_of(const Band& band, const std::vector<Band>& bands, const std::vector<size_t>& others) {
  std::vector<Band> rest{band};
  for (size_t index : others) {
    std::vector<Band> next;
    for (const Band& piece : rest) {
      const std::vector<Band> pieces = subtract(piece, bands[index]);
      next.insert(next.end(), pieces.begin(), pieces.end());
    }
    rest = std::move(next);
  }
  return rest;
}

// Unites pairs of disjoint sorted bands whose union is one band. Returns whether there were any.
bool unite_neighbours(std::vector<Band>& bands) {
  std::vector<size_t> active;
  bool changed = false;
  for (size_t k = 0; k < bands.size(); ++k) {
    retire(active, bands, bands[k].q_begin);
    bool united = false;
    for (size_t index : active) {
      const Band hull = unite(bands[index], bands[k]);
      if (hull == Band{}) continue;
      bands[index] = hull;
      bands[k] = Band{};
      united = changed = true;
      break;
    }
    if (!united) active.push_back(k);
  }
  drop_empty(bands);
  return changed;
}

}  // namespace

// A band is a system of differences over three points (0, i, j); its tightest form is their shortest paths, found by
// going through each of the points once.
Band tighten(Band band) {
  if (band.q_begin >= band.q_end || band.kv_begin >= band.kv_end) return Band{};
  band.lo = std::max(band.lo, band.kv_begin - (band.q_end - 1));
  band.hi = std::min(band.hi, band.kv_end - 1 - band.q_begin);
  if (band.lo > band.hi) return Band{};
  band.kv_begin = std::max(band.kv_begin, band.q_begin + band.lo);
  band.kv_end = std::min(band.kv_end, band.q_end + band.hi);
  band.q_begin = std::max(band.q_begin, band.kv_begin - band.hi);
  band.q_end = std::min(band.q_end, band.kv_end - band.lo);
  return band;
}

bool is_empty(const Band& band) { return tighten(band) == Band{}; }

int64_t count_pairs(const Band& band) {
  const int64_t rows = band.q_end - band.q_begin, columns = band.kv_end - band.kv_begin;
  if (rows <= 0 || columns <= 0 || band.lo > band.hi) return 0;
  const int64_t corner = band.kv_begin - band.q_begin;
  return count_below(rows, columns, band.hi - corner) - count_below(rows, columns, band.lo - corner - 1);
}

Band intersect(const Band& a, const Band& b) {
  return tighten({.q_begin = std::max(a.q_begin, b.q_begin),
                  .q_end = std::min(a.q_end, b.q_end),
                  .kv_begin = std::max(a.kv_begin, b.kv_begin),
                  .kv_end = std::min(a.kv_end, b.kv_end),
                  .lo = std::max(a.lo, b.lo),
                  .hi = std::min(a.hi, b.hi)});
}

// The hull holds both, so it is their union exactly when it holds no more pairs than the two.
Band unite(const Band& a, const Band& b) {
  if (a.q_begin > b.q_end || b.q_begin > a.q_end || a.kv_begin > b.kv_end || b.kv_begin > a.kv_end) return Band{};
  const Band hull{.q_begin = std::min(a.q_begin, b.q_begin),
                  .q_end = std::max(a.q_end, b.q_end),
                  .kv_begin = std::min(a.kv_begin, b.kv_begin),
                  .kv_end = std::max(a.kv_end, b.kv_end),
                  .lo = std::min(a.lo, b.lo),
                  .hi = std::max(a.hi, b.hi)};
  return count_pairs(hull) == count_pairs(a) + count_pairs(b) ? tighten(hull) : Band{};
}

//            +---------------+
//            |      1        |     1, 2   rows before and after the hole
//            +---+-------+---+     3, 4   columns beside it
//            |   |    6  |   |     5, 6   what its rectangle holds below lo and above hi
//            | 3 | hole  | 4 |
//            |   | 5     |   |
//            +---+-------+---+
//            |      2        |
//            +---------------+
std::vector<Band> subtract(const Band& a, const Band& b) {
  const Band hole = intersect(a, b);
  const Band whole = tighten(a);
  std::vector<Band> pieces;
  const auto keep = [&](Band piece) {
    piece = tighten(piece);
    if (piece != Band{}) pieces.push_back(piece);
  };
  if (hole == Band{}) {
    keep(whole);
    return pieces;
  }
  Band piece = whole;
  piece.q_end = hole.q_begin;
  keep(piece);
  piece = whole;
  piece.q_begin = hole.q_end;
  keep(piece);

  Band middle = whole;
  middle.q_begin = hole.q_begin;
  middle.q_end = hole.q_end;
  piece = middle;
  piece.kv_end = hole.kv_begin;
  keep(piece);
  piece = middle;
  piece.kv_begin = hole.kv_end;
  keep(piece);

  middle.kv_begin = hole.kv_begin;
  middle.kv_end = hole.kv_end;
  piece = middle;
  piece.hi = std::min(piece.hi, hole.lo - 1);
  keep(piece);
  piece = middle;
  piece.lo = std::max(piece.lo, hole.hi + 1);
  keep(piece);
  return pieces;
}

std::vector<Band> make_disjoint(const std::vector<Band>& bands) {
  std::vector<Band> sorted;
  sorted.reserve(bands.size());
  for (const Band& band : bands) sorted.push_back(tighten(band));
  drop_empty(sorted);
  std::sort(sorted.begin(), sorted.end(), sorts_before);

  // Sweep over the rows. A band met earlier that lies within the new one leaves; the new one gives up what the others
  // hold already.
  std::vector<Band> result;
  std::vector<size_t> active, others;
  for (const Band& band : sorted) {
    retire(active, result, band.q_begin);
    others.clear();
    for (size_t index : active) {
      if (!meet(result[index], band)) continue;
      if (intersect(result[index], band) == result[index]) {
        result[index] = Band{};
      } else {
        others.push_back(index);
      }
    }
    std::erase_if(active, [&](size_t index) { return result[index] == Band{}; });
    for (const Band& piece : rest_of(band, result, others)) {
      active.push_back(result.size());
      result.push_back(piece);
    }
  }
  drop_empty(result);
  std::sort(result.begin(), result.end(), sorts_before);
  while (unite_neighbours(result)) std::sort(result.begin(), result.end(), sorts_before);
  return result;
}

}  // namespace ringspan
