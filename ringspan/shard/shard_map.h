// ShardMap: who holds which global positions, and in which local rows. For each rank (and each batch entry, or one
// list for all) an ordered list of segments. Local rows that no segment covers are padding: never read, out 0,
// gradient 0. Shards may differ in length or be empty.
//
// Ten positions on two ranks (the digit is the rank that holds the position):
//     contiguous   0 0 0 0 0 1 1 1 1 1
//     head_tail    0 0 1 1 1 1 1 0 0 0      2P chunks; rank r holds chunks r and 2P-1-r
//     striped      0 1 0 1 0 1 0 1 0 1
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ringspan/mask/mask_spec.h"
#include "ringspan/shape/segment.h"

namespace ringspan {

class ShardMap {
 public:
  // Any length >= 0, any world >= 1. Chunk c of n begins at floor(c * seq_len / n).
  static ShardMap contiguous(int64_t seq_len, int64_t world);
  static ShardMap head_tail(int64_t seq_len, int64_t world);
  static ShardMap striped(int64_t seq_len, int64_t world);
  // Contiguous shards of the given lengths, in rank order.
  static ShardMap from_lengths(const std::vector<int64_t>& lengths);
  // Packed documents of these lengths under a causal mask inside each: every document is split head-tail, and whoever
  // has had least work so far gets the heaviest pair of chunks. Kept pairs are balanced, not tokens. Grid: balance.cc.
  // Positions from the last document up to `seq_len` keep nothing; they are shared out in runs of equal length.
  static ShardMap per_document(const std::vector<int64_t>& lengths, int64_t world,
                               std::optional<int64_t> seq_len = std::nullopt);
  // A map for self-attention (queries and K/V split alike) under which every rank has the same work, near enough: the
  // busiest rank has at most 1.02 times the mean where 64 tokens a rank or more leave room for it (one row that keeps
  // more than a rank's share does not). All batch entries together. Shards differ by a few tokens at most where chunks
  // of equal length suffice. Grid: balance.cc. Error where the mask's q_len and kv_len differ. With at most
  // `most_chunks` chunks a rank (at least 2) it may stay farther from the goal, and is found in bounded time: that of
  // the positions and of all rows of all bands.
  static ShardMap balanced(const MaskSpec& mask, int64_t world, int64_t most_chunks = kMaxLength);
  // segments[batch][rank]; one batch list serves every entry. `local_rows[rank]` is the number of rows of the local
  // tensors; empty = up to the last row that a segment covers. Segments are sorted by row, empty ones dropped and
  // neighbours that continue each other joined. Error on overlapping rows or positions, naming both places.
  static ShardMap from_segments(int64_t seq_len, std::vector<std::vector<std::vector<Segment>>> segments,
                                std::vector<int64_t> local_rows = {});

  int64_t seq_len() const { return seq_len_; }
  int64_t world() const { return static_cast<int64_t>(local_rows_.size()); }
  int64_t num_lists() const { return static_cast<int64_t>(segments_.size()); }
  int64_t local_rows(int64_t rank) const { return local_rows_[rank]; }
  std::span<const Segment> segments(int64_t rank, int64_t batch = 0) const {
    return segments_[num_lists() == 1 ? 0 : batch][rank];
  }

  // Global position of each local row; -1 marks padding.
  std::vector<int64_t> positions(int64_t rank, int64_t batch = 0) const;

  // Where a global position lives; nothing where no rank holds it.
  struct RankRow {
    int64_t rank = 0, row = 0;
    bool operator==(const RankRow&) const = default;
  };
  std::optional<RankRow> place_of(int64_t position, int64_t batch = 0) const;

  // True where every position 0..seq_len-1 is held, for every batch entry (a KV map must).
  bool covers_all() const;
  // The first position of a batch entry that no rank holds.
  std::optional<int64_t> first_hole(int64_t batch = 0) const;

  // Kept pairs per rank, all batch entries of the mask (or of the map) added up, in closed form per segment and band;
  // K/V in the same or another map.
  std::vector<int64_t> work(const MaskSpec& mask) const;

  // Work of the busiest rank over the mean of all; 1 where there is no work at all.
  double imbalance(const MaskSpec& mask) const;

  std::string str() const;
  bool operator==(const ShardMap&) const = default;

 private:
  // A segment in the order of positions, for place_of.
  struct Entry {
    int64_t rank = 0;
    Segment segment;
    int64_t reach = 0;  // the last position of this and all earlier entries
    bool operator==(const Entry&) const = default;
  };

  ShardMap(int64_t seq_len, std::vector<std::vector<std::vector<Segment>>> segments, std::vector<int64_t> local_rows);
  void check_rows() const;
  void index_positions();
  void check_positions() const;

  int64_t seq_len_ = 0;
  std::vector<int64_t> local_rows_;
  std::vector<std::vector<std::vector<Segment>>> segments_;  // [batch][rank], in the order of rows
  std::vector<std::vector<Entry>> entries_;                  // [batch], in the order of positions
};

}  // namespace ringspan
