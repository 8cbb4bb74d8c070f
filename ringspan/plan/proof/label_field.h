// What one tensor of a rank holds, as rectangles of heads and rows: whose rows lie there, and, where gradients lie, a
// sum of marks of all that was added. For validate().
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace ringspan::detail {

struct Rect {
  int64_t head_begin = 0, head_end = 0;
  int64_t row = 0, count = 0;
  int64_t owner = 0, owner_row = 0;  // of the first row; the others follow it
  uint64_t marks = 0;

  int64_t area() const { return (head_end - head_begin) * count; }
  int64_t row_end() const { return row + count; }
};

// Where something is looked for.
struct Window {
  int64_t head_begin = 0, head_end = 0;
  int64_t row_begin = 0, row_end = 0;

  int64_t area() const {
    return head_begin < head_end && row_begin < row_end ? (head_end - head_begin) * (row_end - row_begin) : 0;
  }
};

class LabelField {
 public:
  // What lies in the window, cut to it.
  std::vector<Rect> read(const Window& window) const;
  // Takes it out.
  std::vector<Rect> take(const Window& window);
  // Into a place that nothing occupies.
  void put(const Rect& rect) {
    if (rect.area() == 0) return;
    longest_ = std::max(longest_, rect.count);
    rects_.emplace(rect.row, rect);
  }
  void overwrite(const Rect& rect);
  // Adds its marks to what lies there. False, and nothing is changed, where the same rows of the same owner do not.
  bool add(const Rect& rect);

 private:
  // Rows of several owners in turn make a rectangle of each row, so that a search may not go over all.
  using Rects = std::multimap<int64_t, Rect>;
  // The first that may reach into rows from `row` on.
  Rects::const_iterator first_meeting(int64_t row) const { return rects_.lower_bound(row - longest_ + 1); }

  Rects rects_;  // disjoint, by first row
  int64_t longest_ = 0;
};

// A run of rows of a buffer that are rows of one owner.
struct RowRun {
  int64_t row = 0, count = 0, owner = 0, owner_row = 0;
  bool operator==(const RowRun&) const = default;
};
// Those of one head in the order of rows, joined where they continue each other.
std::vector<RowRun> runs_of(const LabelField& field, int64_t head, int64_t num_rows);

}  // namespace ringspan::detail
