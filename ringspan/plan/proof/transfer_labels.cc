#include "ringspan/plan/proof/transfer_labels.h"

#include <algorithm>
#include <span>

namespace ringspan::detail {

std::vector<EndRun> end_runs(const Transfer& t, const BufferPlace& place) {
  std::vector<EndRun> runs;
  int64_t next = 0;
  if (place.slot == kOwnSlot) {
    for (const RowRange& range : t.rows) {
      runs.push_back({range.begin, range.end - range.begin, next});
      next += range.end - range.begin;
    }
  } else if (place.stride == 1) {
    runs.push_back({place.row, t.num_rows(), 0});
  } else {
    for (; next < t.num_rows(); ++next) runs.push_back({place.row + next * place.stride, 1, next});
  }
  return runs;
}

bool is_named(const Transfer& t, const EndRun& run, const Rect& rect) {
  int64_t next = 0;
  const int64_t begin = rect.row - run.row + run.message_row, end = begin + rect.count;
  int64_t fitting = 0;
  for (const RowRange& range : t.rows) {
    const int64_t count = range.end - range.begin;
    const int64_t from = std::max(begin, next), to = std::min(end, next + count);
    if (from < to && rect.owner_row + from - begin == range.begin + from - next) fitting += to - from;
    next += count;
  }
  return fitting == rect.count;
}

bool meets(const Transfer& a, const BufferPlace& at_a, const Transfer& b, const BufferPlace& at_b) {
  if (a.payload != b.payload || at_a.slot != at_b.slot) return false;
  if (a.head_end <= b.head_begin || b.head_end <= a.head_begin) return false;
  if (a.batch_end <= b.batch_begin || b.batch_end <= a.batch_begin) return false;
  // Both ascend.
  const std::vector<EndRun> ones = end_runs(a, at_a), others = end_runs(b, at_b);
  auto one = ones.begin(), other = others.begin();
  while (one != ones.end() && other != others.end()) {
    const int64_t one_end = one->row + one->count, other_end = other->row + other->count;
    if (one->row < other_end && other->row < one_end) return true;
    one_end <= other_end ? ++one : ++other;
  }
  return false;
}

std::vector<Rect> cut_message(const std::vector<Rect>& message, const EndRun& run) {
  LabelField field;
  for (const Rect& rect : message) field.put(rect);
  constexpr int64_t kAllHeads = int64_t{1} << 62;
  return field.read({0, kAllHeads, run.message_row, run.message_row + run.count});
}

std::vector<Segment> segments_of(const std::vector<RowRun>& runs, const ShardMap& map, int64_t batch) {
  std::vector<Segment> segments;
  for (const RowRun& run : runs) {
    const std::span<const Segment> all = map.segments(run.owner, batch);
    auto segment = std::partition_point(all.begin(), all.end(),
                                        [&](const Segment& s) { return s.local_row + s.length <= run.owner_row; });
    for (; segment != all.end() && segment->local_row < run.owner_row + run.count; ++segment) {
      const int64_t from = std::max(segment->local_row, run.owner_row);
      const int64_t to = std::min(segment->local_row + segment->length, run.owner_row + run.count);
      segments.push_back({.local_row = run.row + from - run.owner_row,
                          .begin = segment->position(from - segment->local_row),
                          .length = to - from,
                          .stride = segment->stride});
    }
  }
  return segments;
}

bool lies_in(const std::vector<Segment>& segments, int64_t row0, int64_t rows, int64_t pos0, int64_t stride) {
  int64_t row = row0;
  const int64_t end = row0 + rows;
  auto segment = std::partition_point(segments.begin(), segments.end(),
                                      [&](const Segment& s) { return s.local_row + s.length <= row0; });
  for (; row < end && segment != segments.end() && segment->local_row <= row; ++segment) {
    const int64_t take = std::min(end, segment->local_row + segment->length) - row;
    if (segment->position(row - segment->local_row) != pos0 + (row - row0) * stride) return false;
    if (take > 1 && segment->stride != stride) return false;
    row += take;
  }
  return rows > 0 && row == end;
}

}  // namespace ringspan::detail
