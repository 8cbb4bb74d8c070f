// invariant: every rank sees the sequence in the same blocks of kInvariantBlock positions, in ascending order, whoever
// holds them. What a row adds, and in which order, is the same for every number of ranks and every map, bit by bit.
//
// Five blocks over 2 ranks, causal, contiguous: rank 0 holds blocks 0, 1 and half of 2. KVb is block b of K/V, put
// together in slot [1] or [2] from the rows of whoever holds them; Qb the same of queries, dout, lse and delta. `>`
// goes to the other rank before the tiles of the step are computed; a rank that keeps no pair with a block does not
// get it.
//
//     forward      step 0   1        2        3        4        5
//     rank 0       KV0 >    KV0 [1]  KV1 [2]  KV2 [1]  -        -
//                           KV1 >    KV2 >
//     rank 1       -        KV0 [1]  KV1 [2]  KV2 [1]  KV3 [2]  KV4 [1]
//                                    KV2 >
//
// Backward has two passes. In the first, steps as above, a rank computes dq of its rows alone. In the second blocks of
// queries visit the owners of K/V, who compute dk and dv alone; no gradient travels or is added twice.
//
//     second pass  step 5   6        7        8        9        10
//     rank 0       -        Q0 [1]   Q1 [2]   Q2 [1]   Q3 [2]   Q4 [1]
//                                    Q2 >
//     rank 1       -        -        -        Q2 [1]   Q3 [2]   Q4 [1]
//                                    Q2 >     Q3 >     Q4 >
//
// Messages a rank sends: for each block and each rank that keeps a pair with it, one for each tensor and each run of
// its rows (segments of the map, cut at the blocks); an empty one to the next rank where it has none, so that all post
// alike. Bytes: forward, each row of K/V to each other rank that needs its block: (W - 1) KV at most. Backward as much,
// and (W - 1) of Q, dout, lse and delta at most. Memory: two blocks of each. Products: 7 for each kept pair of backward
// instead of 5, as scores and dP are computed in both passes.
#include <algorithm>
#include <utility>

#include "ringspan/base/error.h"
#include "ringspan/plan/schedules/builder.h"
#include "ringspan/plan/schedules/schedules.h"

namespace ringspan::detail {
namespace {

// One side in blocks, visiting the rows of the other side.
class Visits {
 public:
  Visits(const Plan& plan, const RankPlan& part, bool of_kv, std::vector<Payload> payloads)
      : part_(part),
        plan_(plan),
        of_kv_(of_kv),
        payloads_(std::move(payloads)),
        map_(of_kv ? plan.kv_map() : plan.q_map()),
        num_blocks_(num_invariant_blocks(map_)) {
    blocks_.resize(static_cast<size_t>(num_blocks_));
    for (int64_t rank = 0; rank < part.world; ++rank) find_blocks_of(rank);
    for (int64_t block = 0; block < num_blocks_; ++block) {
      const Rows visiting = rows_in(block);
      blocks_[block].tiles = tiles_of(part.rank, visiting);
      find_receivers(blocks_[block], visiting);
    }
  }

  // The visits of all blocks, from the step after the last of `steps` on. `finish` completes a step that computes.
  template <class Finish>
  void append(std::vector<Step>& steps, Finish&& finish) const {
    if (steps.empty()) steps.push_back({.computes = false});
    const auto first =
        std::find_if(blocks_.begin(), blocks_.end(), [](const Block& one) { return !one.tiles.empty(); });
    // A rank that keeps no pair at all computes the empty result.
    const int64_t begins = first == blocks_.end() ? 0 : first - blocks_.begin();
    for (int64_t block = 0; block < num_blocks_; ++block) {
      Step& before = steps.back();
      post(block, before.step, before.before);
      const bool needed = !blocks_[block].tiles.empty();
      Step step{.step = before.step + 1, .computes = needed || block == begins, .q = own_q(part_), .kv = own_kv(part_)};
      if (needed) (of_kv_ ? step.kv : step.q) = visitor(block, length_of(block));
      step.tiles = blocks_[block].tiles;
      finish(step, block == begins);
      steps.push_back(std::move(step));
    }
  }

 private:
  struct Receiver {
    int64_t rank = 0;
    bool needs = false;  // the block; else it gets an empty message at most
  };
  struct Block {
    std::vector<Tile> tiles{};          // of this rank
    std::vector<int64_t> holders{};     // ranks with rows in it, in ascending order
    std::vector<Receiver> receivers{};  // of what this rank posts, itself among them
    bool is_held_by(int64_t rank) const { return std::binary_search(holders.begin(), holders.end(), rank); }
  };

  // Enters a rank among the holders of its blocks.
  void find_blocks_of(int64_t rank) {
    const auto enter = [&](int64_t block) {
      std::vector<int64_t>& holders = blocks_[block].holders;
      if (holders.empty() || holders.back() != rank) holders.push_back(rank);
    };
    for (int64_t list = 0; list < map_.num_lists(); ++list) {
      for (const Segment& segment : map_.segments(rank, list)) {
        // A run has rows in all blocks between its ends; with a long stride every row may be in another one.
        const int64_t stride = segment.stride <= kInvariantBlock ? kInvariantBlock : segment.stride;
        const int64_t last = segment.position(segment.length - 1);
        for (int64_t position = segment.begin; position < last; position += stride) enter(position / kInvariantBlock);
        enter(last / kInvariantBlock);
      }
    }
  }

  // Between the rows that stay with a rank and those that visit it.
  std::vector<Tile> tiles_of(int64_t rank, const Rows& visiting) const {
    const Rows staying = rows_of(of_kv_ ? plan_.q_map() : plan_.kv_map(), rank);
    return of_kv_ ? tiles_between(plan_, staying, visiting) : tiles_between(plan_, visiting, staying);
  }

  // All ranks, where this one holds some of the block; else the next, which gets an empty message.
  void find_receivers(Block& one, const Rows& visiting) const {
    const auto add = [&](int64_t rank) { one.receivers.push_back({rank, !tiles_of(rank, visiting).empty()}); };
    if (one.is_held_by(part_.rank)) {
      for (int64_t shift = 0; shift < part_.world; ++shift) add(wrap(part_.rank + shift, part_.world));
    } else if (part_.world > 1) {
      add(wrap(part_.rank + 1, part_.world));
    }
  }

  int64_t length_of(int64_t block) const { return std::min(kInvariantBlock, map_.seq_len() - block * kInvariantBlock); }

  Operand visitor(int64_t block, int64_t rows) const {
    return {.slot = 1 + block % 2,
            .owner = kSeveral,
            .rows = rows,
            .head_end = of_kv_ ? part_.problem.kv_heads : part_.problem.q_heads};
  }

  // Rows of one owner that lie in a block.
  std::vector<Piece> pieces_of(int64_t owner, int64_t list, int64_t block) const {
    const int64_t begin = block * kInvariantBlock, end = begin + length_of(block);
    std::vector<Piece> pieces;
    for (const Segment& segment : map_.segments(owner, list)) {
      const auto offset_of = [&](int64_t position) {
        return std::clamp<int64_t>((position - segment.begin + segment.stride - 1) / segment.stride, 0, segment.length);
      };
      const int64_t first = segment.begin >= begin ? 0 : offset_of(begin), last = offset_of(end);
      if (segment.begin >= end || first >= last) continue;
      pieces.push_back(
          {{segment.local_row + first, segment.local_row + last}, segment.position(first) - begin, segment.stride});
    }
    return pieces;
  }

  // The rows of a block that some rank holds, in runs that do not tell who.
  Rows rows_in(int64_t block) const {
    const int64_t begin = block * kInvariantBlock, length = length_of(block);
    Rows rows{.count = length};
    for (int64_t list = 0; list < map_.num_lists(); ++list) {
      std::vector<uint8_t> held(static_cast<size_t>(length), 0);
      for (const int64_t owner : blocks_[block].holders) {
        for (const Piece& piece : pieces_of(owner, list, block)) {
          const int64_t count = piece.rows.end - piece.rows.begin;
          for (int64_t i = 0; i < count; ++i) held[piece.row + i * piece.stride] = 1;
        }
      }
      std::vector<Segment>& segments = rows.segments.emplace_back();
      for (auto run = std::find(held.begin(), held.end(), 1); run != held.end();) {
        const auto end = std::find(run, held.end(), 0);
        segments.push_back(
            {.local_row = run - held.begin(), .begin = begin + (run - held.begin()), .length = end - run});
        run = std::find(end, held.end(), 1);
      }
    }
    return rows;
  }

  // What this rank sends of the block and puts in its own place, then what it receives.
  void post(int64_t block, int64_t step, std::vector<Transfer>& transfers) const {
    const Block& one = blocks_[block];
    for (const auto& [dst, needs] : one.receivers) add(part_.rank, dst, block, needs, step, transfers);
    const auto receive = [&](int64_t src) { add(src, part_.rank, block, !one.tiles.empty(), step, transfers); };
    // The nearest before this rank first.
    const auto own = std::lower_bound(one.holders.begin(), one.holders.end(), part_.rank);
    const int64_t previous = wrap(part_.rank - 1, part_.world);
    if (previous != part_.rank && !one.is_held_by(previous)) receive(previous);
    for (auto src = own; src != one.holders.begin();) receive(*--src);
    for (auto src = one.holders.end(); src != own;) {
      if (*--src != part_.rank) receive(*src);
    }
  }

  void add(int64_t src, int64_t dst, int64_t block, bool needed, int64_t step, std::vector<Transfer>& transfers) const {
    Route route{.step = step,
                .needed_by = step + 1,
                .src = src,
                .dst = dst,
                .owner = src,
                .from = of_kv_ ? kv_shard(part_, src) : q_shard(part_, src),
                .to = visitor(block, needed ? length_of(block) : 0)};
    const int64_t lists = map_.num_lists();
    for (const Payload payload : payloads_) {
      const size_t posted = transfers.size();
      for (int64_t list = 0; needed && list < lists; ++list) {
        for (const Piece& piece : pieces_of(src, list, block)) {
          route.to_row = piece.row, route.to_stride = piece.stride;
          Transfer& transfer = transfers.emplace_back(transfer_of(part_, payload, route, {piece.rows}));
          if (lists > 1) transfer.batch_begin = list, transfer.batch_end = list + 1;
        }
      }
      const bool is_next = src != dst && dst == wrap(src + 1, part_.world);
      if (is_next && transfers.size() == posted) transfers.push_back(transfer_of(part_, payload, route, {}));
    }
  }

  const RankPlan& part_;
  const Plan& plan_;
  bool of_kv_;
  std::vector<Payload> payloads_;
  const ShardMap& map_;
  int64_t num_blocks_;
  std::vector<Block> blocks_;
};

}  // namespace

int64_t num_invariant_blocks(const ShardMap& map) {
  return std::max<int64_t>((map.seq_len() + kInvariantBlock - 1) / kInvariantBlock, 1);
}

void check_invariant(const Problem& problem, const ShardMap& q_map) {
  for (const auto& [name, tensor] : {std::pair("bias", &problem.bias), std::pair("mask", &problem.mask)}) {
    RINGSPAN_CHECK(!tensor->is_given() || q_map.num_lists() == 1 || tensor->batch == problem.batch,
                   "plan: schedule invariant puts query rows in global order, which the shard map gives for each of ",
                   problem.batch, " batch entries, and the ", name, " has ", tensor->batch,
                   "; give it one for each entry");
  }
}

void build_invariant(const Plan& plan, RankPlan& part) {
  const Visits keys(plan, part, true, kv_inputs());
  keys.append(part.forward, [](Step&, bool) {});
  constexpr GradientPlace kNone{.slot = kNoSlot, .begins = false};
  keys.append(part.backward, [&](Step& step, bool begins) {
    step.dq = {.begins = begins};
    step.dkv = kNone;
  });
  const Visits queries(plan, part, false, backward_q_inputs(part.problem));
  queries.append(part.backward, [&](Step& step, bool begins) {
    step.dq = kNone;
    step.dkv = {.begins = begins};
  });
}

}  // namespace ringspan::detail
