// Pieces from which schedules are built: rows, tiles, operands and transfers.
#pragma once

#include <span>
#include <vector>

#include "ringspan/plan/plan.h"

namespace ringspan::detail {

inline int64_t wrap(int64_t rank, int64_t world) { return (rank % world + world) % world; }

// Rows of some shards, one shard after the other, and the positions that they hold.
struct Rows {
  int64_t count = 0;
  std::vector<std::vector<Segment>> segments{};  // one list for each of the map's
};
Rows rows_of(const ShardMap& map, std::span<const int64_t> ranks);
Rows rows_of(const ShardMap& map, int64_t rank);

// Rows of one shard that lie in a buffer: the first in its row `row`, each other one `stride` rows further.
struct Piece {
  RowRange rows{};
  int64_t row = 0, stride = 1;
};

// The tiles of the mask between them, of all batch entries.
std::vector<Tile> tiles_between(const Plan& plan, const Rows& q, const Rows& kv);

// RankPlan::q_padding of rows.
std::vector<std::vector<RowRange>> padding_of(const Rows& rows);

// in_sequence: the rows of several shards in one buffer, in the order of the sequence. Head-tail over two ranks, eight
// positions (the digits), rank 1 with a padding row (-):
//
//     shards   rank 0   0 1 6 7          in the order of the ranks   0 1 6 7 2 3 4 5 -    4 segments
//              rank 1   2 3 4 5 -        in that of the sequence     0 1 2 3 4 5 6 7 -    1 segment
//
// A mask meets two buffers of one segment each in a few tiles, where it meets 2W segments a side in 2 W^2 of them. The
// price is one more piece for each run of rows that no longer lies beside its neighbours.
struct TeamRows {
  Rows buffer{};
  std::vector<std::vector<Piece>> pieces{};  // of each shard; together all its rows, in ascending order. Never empty.
};

// Striped shards lie interleaved, so that they make one segment too. Rows of no position come last. Shards that a
// buffer cannot put in order in a few pieces each, and those of a map with a list for each batch entry, lie in the
// order of `ranks`.
TeamRows in_sequence(const ShardMap& map, std::span<const int64_t> ranks);

// A whole shard with all heads, in its owner's tensor or in a slot; this rank's own.
Operand q_shard(const RankPlan& part, int64_t owner, int64_t slot = kOwnSlot);
Operand kv_shard(const RankPlan& part, int64_t owner, int64_t slot = kOwnSlot);
inline Operand own_q(const RankPlan& part) { return q_shard(part, part.rank); }
inline Operand own_kv(const RankPlan& part) { return kv_shard(part, part.rank); }

// What each side consists of. Backward's query side has the bias and the mask where they are split by rows.
std::vector<Payload> kv_inputs();
std::vector<Payload> forward_q_inputs(const Problem& problem);
std::vector<Payload> backward_q_inputs(const Problem& problem);
std::vector<Payload> kv_gradients();
std::vector<Payload> q_gradients(const Problem& problem);
std::vector<Payload> results();

// All batch entries of `owner`'s rows and the operand's heads, between the places that `from` and `to` stand for. An
// own slot is the owner's tensor; in another one the rows begin at `from_row`, `to_row` and lie a stride apart.
struct Route {
  int64_t step = 0, needed_by = 0;
  int64_t src = 0, dst = 0, owner = 0;
  Operand from{}, to{};
  int64_t from_row = 0, from_stride = 1;
  int64_t to_row = 0, to_stride = 1;
  bool adds = false;
};
// `rows` of the owner; of `from`'s buffer where the owner is kSeveral.
Transfer transfer_of(const RankPlan& part, Payload payload, const Route& route, std::vector<RowRange> rows);

}  // namespace ringspan::detail
