#include <algorithm>
#include <utility>

#include "ringspan/plan/schedules/builder.h"

namespace ringspan::detail {
namespace {

// Every piece is a message. Head and tail, and padding behind each of them, are four.
constexpr size_t kMostPieces = 4;

// A segment, and which of the shards holds it.
struct ShardSegment {
  size_t shard = 0;
  Segment segment{};
};

// How many of `held`, sorted by position, interleave to one run of positions from the first on: as many as their
// stride, each one position behind the one before, none longer than it and the last at most one row shorter than the
// first. One where they do not.
size_t interleaved(std::span<const ShardSegment> held) {
  const Segment& first = held.front().segment;
  const auto stride = static_cast<size_t>(first.stride);
  if (first.length == 1 || stride > held.size()) return 1;
  int64_t total = 0;
  for (size_t k = 0; k < stride; ++k) total += held[k].segment.length;
  for (size_t k = 0; k < stride; ++k) {
    const Segment& segment = held[k].segment;
    const auto offset = static_cast<int64_t>(k);
    const bool in_step = segment.stride == first.stride || segment.length == 1;
    if (!in_step || segment.begin != first.begin + offset) return 1;
    if (segment.length != (total - offset + first.stride - 1) / first.stride) return 1;
  }
  return stride;
}

class Sequence {
 public:
  Sequence(const ShardMap& map, std::span<const int64_t> ranks) {
    std::vector<ShardSegment> held;
    for (size_t shard = 0; shard < ranks.size(); ++shard) {
      for (const Segment& segment : map.segments(ranks[shard])) held.push_back({shard, segment});
    }
    std::sort(held.begin(), held.end(),
              [](const ShardSegment& a, const ShardSegment& b) { return a.segment.begin < b.segment.begin; });
    team_.pieces.resize(ranks.size());
    team_.buffer.segments.resize(1);
    for (size_t k = 0; k < held.size();) {
      const size_t count = interleaved(std::span(held).subspan(k));
      add_run(std::span(held).subspan(k, count));
      k += count;
    }
    for (size_t shard = 0; shard < ranks.size(); ++shard) finish(team_.pieces[shard], map.local_rows(ranks[shard]));
  }

  TeamRows take() { return std::move(team_); }

 private:
  void add_run(std::span<const ShardSegment> run) {
    const auto count = static_cast<int64_t>(run.size());
    Segment whole = run.front().segment;
    whole.local_row = team_.buffer.count;
    if (count > 1 || whole.length == 1) whole.stride = 1;
    for (int64_t k = 0; k < count; ++k) {
      const Segment& segment = run[static_cast<size_t>(k)].segment;
      if (k > 0) whole.length += segment.length;
      team_.pieces[run[static_cast<size_t>(k)].shard].push_back(
          {{segment.local_row, segment.local_row + segment.length}, whole.local_row + k, count});
    }
    team_.buffer.count += whole.length;
    std::vector<Segment>& segments = team_.buffer.segments.front();
    if (!segments.empty() && whole.stride == 1 && segments.back().stride == 1 &&
        segments.back().begin + segments.back().length == whole.begin) {
      segments.back().length += whole.length;
    } else {
      segments.push_back(whole);
    }
  }

  // Adds what holds no position, and joins what lies together at both ends.
  void finish(std::vector<Piece>& pieces, int64_t num_rows) {
    std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.rows < b.rows; });
    std::vector<Piece> all;
    const auto add = [&](const Piece& piece) {
      if (!all.empty() && all.back().stride == 1 && piece.stride == 1 &&
          all.back().row + all.back().rows.end - all.back().rows.begin == piece.row) {
        all.back().rows.end = piece.rows.end;
      } else {
        all.push_back(piece);
      }
    };
    int64_t next = 0;
    const auto add_padding = [&](int64_t end) {
      if (end == next) return;
      add({{next, end}, team_.buffer.count, 1});
      team_.buffer.count += end - next;
    };
    for (const Piece& piece : pieces) {
      add_padding(piece.rows.begin);
      add(piece);
      next = piece.rows.end;
    }
    add_padding(num_rows);
    if (all.empty()) all.push_back({});
    pieces = std::move(all);
  }

  TeamRows team_;
};

TeamRows in_rank_order(const ShardMap& map, std::span<const int64_t> ranks) {
  TeamRows team{.buffer = rows_of(map, ranks)};
  int64_t row = 0;
  for (const int64_t rank : ranks) {
    team.pieces.push_back({{{0, map.local_rows(rank)}, row, 1}});
    row += map.local_rows(rank);
  }
  return team;
}

}  // namespace

TeamRows in_sequence(const ShardMap& map, std::span<const int64_t> ranks) {
  if (map.num_lists() > 1) return in_rank_order(map, ranks);
  TeamRows team = Sequence(map, ranks).take();
  const bool is_short = std::all_of(team.pieces.begin(), team.pieces.end(),
                                    [](const std::vector<Piece>& pieces) { return pieces.size() <= kMostPieces; });
  return is_short ? team : in_rank_order(map, ranks);
}

}  // namespace ringspan::detail
