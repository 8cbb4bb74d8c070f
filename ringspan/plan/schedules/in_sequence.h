// in_sequence: the rows of several shards in one buffer, in the order of the sequence. Head-tail over two ranks, eight
// positions (the digits), rank 1 with a padding row (-):
//
//     shards   rank 0   0 1 6 7          in the order of the ranks   0 1 6 7 2 3 4 5 -    4 segments
//              rank 1   2 3 4 5 -        in that of the sequence     0 1 2 3 4 5 6 7 -    1 segment
//
// A mask meets two buffers of one segment each in a few tiles, where it meets 2W segments a side in 2 W^2 of them. The
// price is one more piece for each run of rows that no longer lies beside its neighbours.
#pragma once

#include <span>
#include <vector>

#include "ringspan/plan/schedules/builder.h"

namespace ringspan::detail {

struct TeamRows {
  Rows buffer{};
  std::vector<std::vector<Piece>> pieces{};  // of each shard; together all its rows, in ascending order. Never empty.
};

// Striped shards lie interleaved, so that they make one segment too. Rows of no position come last. Shards that a
// buffer cannot put in order in a few pieces each, and those of a map with a list for each batch entry, lie in the
// order of `ranks`.
TeamRows in_sequence(const ShardMap& map, std::span<const int64_t> ranks);

}  // namespace ringspan::detail
