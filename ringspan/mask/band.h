// Band: a rectangle of global positions cut by two diagonals. It keeps (i, j) where
//     q_begin <= i < q_end,   kv_begin <= j < kv_end,   lo <= j - i <= hi.
//
// Causal with a window of 3 over 6 positions is one band, lo = -2, hi = 0:
//
//            j 0 1 2 3 4 5
//        i 0   x
//          1   x x
//          2   x x x
//          3     x x x
//          4       x x x
//          5         x x x
#pragma once

#include <cstdint>
#include <vector>

namespace ringspan {

// An open side of a diagonal pair. Far from overflow when positions are added to it.
constexpr int64_t kNoDiagonal = int64_t{1} << 60;

struct Band {
  int64_t q_begin = 0, q_end = 0;
  int64_t kv_begin = 0, kv_end = 0;
  int64_t lo = -kNoDiagonal, hi = kNoDiagonal;

  bool keeps(int64_t i, int64_t j) const {
    return q_begin <= i && i < q_end && kv_begin <= j && j < kv_end && lo <= j - i && j - i <= hi;
  }
  bool operator==(const Band&) const = default;
};

// The same pairs in the smallest rectangle and the tightest diagonals; an empty band becomes Band{} .
Band tighten(Band band);
bool is_empty(const Band& band);
// Number of kept pairs, in closed form.
int64_t count_pairs(const Band& band);

Band intersect(const Band& a, const Band& b);
// Two disjoint bands as one, tightened; Band{} where their union is not a band.
Band unite(const Band& a, const Band& b);
// a without b, as at most six disjoint bands.
std::vector<Band> subtract(const Band& a, const Band& b);
// The same set of pairs as disjoint, tightened, non-empty bands, sorted by first row. Bands that were disjoint stay as
// they are or unite, so n of them cost n log n unless many share rows.
std::vector<Band> make_disjoint(const std::vector<Band>& bands);

}  // namespace ringspan
