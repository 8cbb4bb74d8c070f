#include "ringspan/shard/shard_map.h"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

int64_t last_position(const Segment& segment) { return segment.position(segment.length - 1); }

void check_size(int64_t seq_len, int64_t world) {
  RINGSPAN_CHECK(0 <= seq_len && seq_len <= kMaxLength, "shard map: seq_len is ", seq_len, "; it must be in 0..",
                 kMaxLength);
  RINGSPAN_CHECK(world >= 1, "shard map: the world has ", world, " ranks; it needs at least 1");
}

// Where chunk `chunk` of `num_chunks` begins.
int64_t chunk_begin(int64_t seq_len, int64_t chunk, int64_t num_chunks) { return chunk * seq_len / num_chunks; }

std::string describe(int64_t batch, int64_t rank, const Segment& segment) {
  return concat("batch ", batch, " rank ", rank, " segment {local_row ", segment.local_row, ", begin ", segment.begin,
                ", length ", segment.length, ", stride ", segment.stride, "}");
}

void check_segment(int64_t seq_len, int64_t batch, int64_t rank, const Segment& segment) {
  RINGSPAN_CHECK(segment.length >= 0 && segment.local_row >= 0 && segment.begin >= 0 && segment.stride >= 1,
                 "shard map: ", describe(batch, rank, segment),
                 ": row, begin and length must not be negative, and the stride at least 1");
  if (segment.length == 0) return;
  const bool fits = segment.begin < seq_len && segment.length - 1 <= (seq_len - 1 - segment.begin) / segment.stride;
  RINGSPAN_CHECK(fits, "shard map: ", describe(batch, rank, segment), " leaves the sequence of ", seq_len,
                 " positions; shorten it or raise seq_len");
  RINGSPAN_CHECK(segment.local_row <= kMaxLength, "shard map: ", describe(batch, rank, segment), ": rows may go up to ",
                 kMaxLength);
}

// Sorted by row, without empty segments; neighbours that continue each other become one.
std::vector<Segment> joined(std::vector<Segment> segments) {
  std::erase_if(segments, [](const Segment& segment) { return segment.length == 0; });
  std::sort(segments.begin(), segments.end(),
            [](const Segment& a, const Segment& b) { return a.local_row < b.local_row; });
  std::vector<Segment> result;
  for (Segment segment : segments) {
    if (segment.length == 1) segment.stride = 1;
    if (!result.empty()) {
      Segment& last = result.back();
      const bool rows_follow = last.local_row + last.length == segment.local_row;
      if (rows_follow && last.stride == segment.stride && last.position(last.length) == segment.begin) {
        last.length += segment.length;
        continue;
      }
    }
    result.push_back(segment);
  }
  return result;
}

// A position that both hold; nothing where they are disjoint. The members of one progression meet the residues of the
// other in a cycle of (smaller stride / common divisor), so that many members decide.
std::optional<int64_t> common_position(const Segment& a, const Segment& b) {
  const Segment& wide = a.stride >= b.stride ? a : b;
  const Segment& narrow = a.stride >= b.stride ? b : a;
  const int64_t first = std::max(a.begin, b.begin), last = std::min(last_position(a), last_position(b));
  const int64_t divisor = std::gcd(a.stride, b.stride);
  if (first > last || (a.begin - b.begin) % divisor != 0) return std::nullopt;
  int64_t position = wide.position((first - wide.begin + wide.stride - 1) / wide.stride);
  for (int64_t tries = 0; tries < narrow.stride / divisor && position <= last; ++tries, position += wide.stride) {
    if ((position - narrow.begin) % narrow.stride == 0) return position;
  }
  return std::nullopt;
}

}  // namespace

ShardMap::ShardMap(int64_t seq_len, std::vector<std::vector<std::vector<Segment>>> segments,
                   std::vector<int64_t> local_rows)
    : seq_len_(seq_len), local_rows_(std::move(local_rows)), segments_(std::move(segments)) {
  const bool count_rows = local_rows_.empty();
  local_rows_.resize(segments_[0].size(), 0);
  for (auto& ranks : segments_) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      ranks[rank] = joined(std::move(ranks[rank]));
      if (!count_rows) continue;
      for (const Segment& segment : ranks[rank]) {
        local_rows_[rank] = std::max(local_rows_[rank], segment.local_row + segment.length);
      }
    }
  }
  index_positions();
}

ShardMap ShardMap::contiguous(int64_t seq_len, int64_t world) {
  check_size(seq_len, world);
  std::vector<std::vector<Segment>> ranks(world);
  for (int64_t rank = 0; rank < world; ++rank) {
    const int64_t begin = chunk_begin(seq_len, rank, world), end = chunk_begin(seq_len, rank + 1, world);
    ranks[rank] = {{.local_row = 0, .begin = begin, .length = end - begin}};
  }
  return ShardMap(seq_len, {std::move(ranks)}, {});
}

ShardMap ShardMap::head_tail(int64_t seq_len, int64_t world) {
  check_size(seq_len, world);
  std::vector<std::vector<Segment>> ranks(world);
  for (int64_t rank = 0; rank < world; ++rank) {
    for (int64_t chunk : {rank, 2 * world - 1 - rank}) {
      const int64_t begin = chunk_begin(seq_len, chunk, 2 * world), end = chunk_begin(seq_len, chunk + 1, 2 * world);
      const int64_t row = ranks[rank].empty() ? 0 : ranks[rank][0].length;
      ranks[rank].push_back({.local_row = row, .begin = begin, .length = end - begin});
    }
  }
  return ShardMap(seq_len, {std::move(ranks)}, {});
}

ShardMap ShardMap::striped(int64_t seq_len, int64_t world) {
  check_size(seq_len, world);
  std::vector<std::vector<Segment>> ranks(world);
  for (int64_t rank = 0; rank < std::min(world, seq_len); ++rank) {
    ranks[rank] = {{.begin = rank, .length = (seq_len - rank + world - 1) / world, .stride = world}};
  }
  return ShardMap(seq_len, {std::move(ranks)}, {});
}

ShardMap ShardMap::from_lengths(const std::vector<int64_t>& lengths) {
  std::vector<std::vector<Segment>> ranks;
  int64_t begin = 0;
  for (size_t rank = 0; rank < lengths.size(); ++rank) {
    RINGSPAN_CHECK(lengths[rank] >= 0, "shard map: lengths[", rank, "] is ", lengths[rank], "; it must be at least 0");
    RINGSPAN_CHECK(lengths[rank] <= kMaxLength - begin, "shard map: lengths up to rank ", rank, " add up to more than ",
                   kMaxLength);
    ranks.push_back({{.local_row = 0, .begin = begin, .length = lengths[rank]}});
    begin += lengths[rank];
  }
  check_size(begin, static_cast<int64_t>(lengths.size()));
  return ShardMap(begin, {std::move(ranks)}, {});
}

ShardMap ShardMap::from_segments(int64_t seq_len, std::vector<std::vector<std::vector<Segment>>> segments,
                                 std::vector<int64_t> local_rows) {
  RINGSPAN_CHECK(!segments.empty(),
                 "shard map: there is no list of segments; give one per batch entry, or one for all");
  const size_t world = segments[0].size();
  check_size(seq_len, static_cast<int64_t>(world));
  RINGSPAN_CHECK(local_rows.empty() || local_rows.size() == world, "shard map: local_rows has ", local_rows.size(),
                 " entries for ", world, " ranks; give one per rank, or none");
  for (size_t batch = 0; batch < segments.size(); ++batch) {
    RINGSPAN_CHECK(segments[batch].size() == world, "shard map: batch ", batch, " has ", segments[batch].size(),
                   " ranks and batch 0 has ", world, "; all have the same ranks");
    for (size_t rank = 0; rank < world; ++rank) {
      for (const Segment& segment : segments[batch][rank])
        check_segment(seq_len, static_cast<int64_t>(batch), static_cast<int64_t>(rank), segment);
    }
  }
  ShardMap map(seq_len, std::move(segments), std::move(local_rows));
  map.check_rows();
  map.check_positions();
  return map;
}

void ShardMap::check_rows() const {
  for (int64_t rank = 0; rank < world(); ++rank) {
    RINGSPAN_CHECK(0 <= local_rows_[rank] && local_rows_[rank] <= 2 * kMaxLength, "shard map: local_rows[", rank,
                   "] is ", local_rows_[rank], "; it must be in 0..", 2 * kMaxLength);
    for (int64_t batch = 0; batch < num_lists(); ++batch) {
      const std::span<const Segment> list = segments(rank, batch);
      for (size_t k = 0; k < list.size(); ++k) {
        const int64_t end = list[k].local_row + list[k].length;
        RINGSPAN_CHECK(end <= local_rows_[rank], "shard map: ", describe(batch, rank, list[k]), " ends at row ", end,
                       " but local_rows[", rank, "] is ", local_rows_[rank], "; raise it or shorten the segment");
        RINGSPAN_CHECK(k + 1 == list.size() || end <= list[k + 1].local_row,
                       "shard map: ", describe(batch, rank, list[k]), " and ", describe(batch, rank, list[k + 1]),
                       " share local rows; move one of them");
      }
    }
  }
}

void ShardMap::index_positions() {
  for (const auto& ranks : segments_) {
    std::vector<Entry>& entries = entries_.emplace_back();
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      for (const Segment& segment : ranks[rank]) {
        entries.push_back({.rank = static_cast<int64_t>(rank), .segment = segment});
      }
    }
    std::stable_sort(entries.begin(), entries.end(),
                     [](const Entry& a, const Entry& b) { return a.segment.begin < b.segment.begin; });
    int64_t reach = -1;
    for (Entry& entry : entries) entry.reach = reach = std::max(reach, last_position(entry.segment));
  }
}

void ShardMap::check_positions() const {
  for (int64_t batch = 0; batch < num_lists(); ++batch) {
    std::vector<const Entry*> active;
    for (const Entry& entry : entries_[batch]) {
      std::erase_if(active, [&](const Entry* other) { return last_position(other->segment) < entry.segment.begin; });
      for (const Entry* other : active) {
        const std::optional<int64_t> common = common_position(other->segment, entry.segment);
        RINGSPAN_CHECK(!common, "shard map: position ", common.value_or(0), " is held twice, by ",
                       describe(batch, other->rank, other->segment), " and by ",
                       describe(batch, entry.rank, entry.segment), "; each position has one place");
      }
      active.push_back(&entry);
    }
  }
}

std::vector<int64_t> ShardMap::positions(int64_t rank, int64_t batch) const {
  std::vector<int64_t> result(local_rows_[rank], -1);
  for (const Segment& segment : segments(rank, batch)) {
    for (int64_t k = 0; k < segment.length; ++k) result[segment.local_row + k] = segment.position(k);
  }
  return result;
}

std::optional<ShardMap::RankRow> ShardMap::place_of(int64_t position, int64_t batch) const {
  const std::vector<Entry>& entries = entries_[num_lists() == 1 ? 0 : batch];
  auto entry = std::partition_point(entries.begin(), entries.end(),
                                    [&](const Entry& other) { return other.segment.begin <= position; });
  while (entry != entries.begin()) {
    --entry;
    if (entry->reach < position) break;
    const Segment& segment = entry->segment;
    const int64_t offset = (position - segment.begin) / segment.stride;
    if (offset < segment.length && segment.position(offset) == position) {
      return RankRow{.rank = entry->rank, .row = segment.local_row + offset};
    }
  }
  return std::nullopt;
}

bool ShardMap::covers_all() const {
  for (const std::vector<Entry>& entries : entries_) {
    int64_t held = 0;
    for (const Entry& entry : entries) held += entry.segment.length;
    if (held != seq_len_) return false;
  }
  return true;
}

std::optional<int64_t> ShardMap::first_hole(int64_t batch) const {
  int64_t held = 0;
  for (const Entry& entry : entries_[num_lists() == 1 ? 0 : batch]) held += entry.segment.length;
  if (held == seq_len_) return std::nullopt;
  int64_t position = 0;
  while (place_of(position, batch)) ++position;
  return position;
}

std::vector<int64_t> ShardMap::work(const MaskSpec& mask) const {
  RINGSPAN_CHECK(mask.q_len() == seq_len_, "work: the mask has ", mask.q_len(), " query positions and the map ",
                 seq_len_, "; build both for the same sequence");
  RINGSPAN_CHECK(mask.num_lists() == num_lists() || mask.num_lists() == 1 || num_lists() == 1, "work: the mask has ",
                 mask.num_lists(), " batch entries and the map ", num_lists(),
                 "; give both the same batch or a single list");
  std::vector<int64_t> pairs(world(), 0);
  if (mask.kv_len() == 0) return pairs;
  const Segment all_kv{.length = mask.kv_len()};
  for (int64_t batch = 0; batch < std::max(mask.num_lists(), num_lists()); ++batch) {
    for (int64_t rank = 0; rank < world(); ++rank) {
      for (const Tile& tile : intersect(mask, batch, segments(rank, batch), std::span(&all_kv, 1))) {
        pairs[rank] += count_pairs(tile);
      }
    }
  }
  return pairs;
}

std::string ShardMap::str() const {
  std::ostringstream text;
  text << seq_len_ << " positions on " << world() << (world() == 1 ? " rank\n" : " ranks\n");
  for (int64_t batch = 0; batch < num_lists(); ++batch) {
    if (num_lists() > 1) text << "batch " << batch << "\n";
    for (int64_t rank = 0; rank < world(); ++rank) {
      text << "  rank " << rank << ": " << local_rows_[rank] << " rows";
      for (const Segment& segment : segments(rank, batch)) {
        text << ", [" << segment.begin << ".." << last_position(segment);
        if (segment.stride != 1) text << " by " << segment.stride;
        text << "] at row " << segment.local_row;
      }
      text << "\n";
    }
  }
  return text.str();
}

}  // namespace ringspan
