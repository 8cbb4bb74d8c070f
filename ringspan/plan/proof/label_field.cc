#include "ringspan/plan/proof/label_field.h"

#include <algorithm>

namespace ringspan::detail {
namespace {

Rect cut(const Rect& rect, const Window& window) {
  Rect part = rect;
  part.head_begin = std::max(rect.head_begin, window.head_begin);
  part.head_end = std::max(part.head_begin, std::min(rect.head_end, window.head_end));
  part.row = std::max(rect.row, window.row_begin);
  part.count = std::max<int64_t>(0, std::min(rect.row_end(), window.row_end) - part.row);
  part.owner_row += part.row - rect.row;
  return part;
}

Window window_of(const Rect& rect) { return {rect.head_begin, rect.head_end, rect.row, rect.row_end()}; }

}  // namespace

std::vector<Rect> LabelField::read(const Window& window) const {
  std::vector<Rect> found;
  for (auto rect = first_meeting(window.row_begin); rect != rects_.end() && rect->first < window.row_end; ++rect) {
    const Rect part = cut(rect->second, window);
    if (part.area() > 0) found.push_back(part);
  }
  return found;
}

std::vector<Rect> LabelField::take(const Window& window) {
  std::vector<Rect> found, left;
  for (auto next = first_meeting(window.row_begin); next != rects_.end() && next->first < window.row_end;) {
    const Rect rect = next->second, part = cut(rect, window);
    if (part.area() == 0) {
      ++next;
      continue;
    }
    next = rects_.erase(next);
    found.push_back(part);
    // Rows before and after it, and of its rows the heads before and after.
    for (const Window& rest : {Window{rect.head_begin, rect.head_end, rect.row, part.row},
                               Window{rect.head_begin, rect.head_end, part.row_end(), rect.row_end()},
                               Window{rect.head_begin, part.head_begin, part.row, part.row_end()},
                               Window{part.head_end, rect.head_end, part.row, part.row_end()}}) {
      const Rect piece = cut(rect, rest);
      if (rest.area() > 0 && piece.area() > 0) left.push_back(piece);
    }
  }
  for (const Rect& rect : left) put(rect);
  return found;
}

void LabelField::overwrite(const Rect& rect) {
  take(window_of(rect));
  put(rect);
}

bool LabelField::add(const Rect& rect) {
  const std::vector<Rect> there = read(window_of(rect));
  int64_t area = 0;
  for (const Rect& part : there) {
    area += part.area();
    if (part.owner != rect.owner || part.owner_row - part.row != rect.owner_row - rect.row) return false;
  }
  if (area != rect.area()) return false;
  for (Rect part : take(window_of(rect))) {
    part.marks += rect.marks;
    put(part);
  }
  return true;
}

std::vector<RowRun> runs_of(const LabelField& field, int64_t head, int64_t num_rows) {
  std::vector<Rect> rects = field.read({head, head + 1, 0, num_rows});
  std::sort(rects.begin(), rects.end(), [](const Rect& a, const Rect& b) { return a.row < b.row; });
  std::vector<RowRun> runs;
  for (const Rect& rect : rects) {
    RowRun* last = runs.empty() ? nullptr : &runs.back();
    const bool continues = last && last->row + last->count == rect.row && last->owner == rect.owner &&
                           last->owner_row + last->count == rect.owner_row;
    if (continues) {
      last->count += rect.count;
    } else {
      runs.push_back({rect.row, rect.count, rect.owner, rect.owner_row});
    }
  }
  return runs;
}

}  // namespace ringspan::detail
