// ulysses over W = 2 ranks with 4 query heads and 2 KV heads; Qr:0-1 are the heads 0 and 1 of rank r's rows. Every rank
// gives away the heads of others and gets the rows of others:
//
//              step 0, in [0]                    step 1, in [1]                          after step 1
//     rank 0   Q0:2-3  K0:1  V0:1 > rank 1       heads 0-1 of all rows, KV head 0        rows 1 of the results >> 1
//     rank 1   Q1:0-1  K1:0  V1:0 > rank 0       heads 2-3 of all rows, KV head 1        rows 0 of the results >> 0
//
// Results are out, max, sum and lse. A rank keeps its own share too: it is copied into [1]. Backward does the same
// with q, k, v, dout, lse and delta; then dq, dk and dv go home. Heads are split evenly, to within one: where a KV
// head serves query heads of several ranks, each gets it, and its gradient is summed at home. With fewer heads than
// ranks some ranks only pass on.
//
// hybrid over W = 4 ranks with teams of 2: ranks 0, 1 and ranks 2, 3 split heads as above; then the ranks in the same
// place, 0 and 2, 1 and 3, are a ring (ring.cc) of two, which moves the K/V of a whole team, in [1], [2] and [3].
//              step 0        step 1            step 2
//     rank 0   exchange      KV of 0,1 [1] >   KV of 2,3 [2]
//     rank 2   exchange      KV of 2,3 [1] >   KV of 0,1 [2]
//
// In [1] and its like the rows of a team lie in the order of the sequence (builder.h), so that a mask meets few
// segments, whatever the map.
//
// Messages a rank sends, every tensor counted apart, teams of U ranks and R = W / U teams, c pieces of a shard:
//     forward (U - 1) (3 + 4) c and 2 (R - 1);   backward (U - 1) (6 + 3) c and the ring's.
// c is 1 for shards of one segment and for striped ones, 2 for head-tail.
// Bytes a rank sends, n rows a rank, N query heads, M KV heads, no KV head in two places:
//     forward   n (U - 1) / U batch (N (qk_dim + v_dim) e + M (qk_dim + v_dim) e + 3 N a)
//     backward  n (U - 1) / U batch (N (qk_dim + v_dim) e + M (qk_dim + v_dim) e + 2 N a
//                                    + (N qk_dim + M (qk_dim + v_dim)) a)
//     and of the ring what R ranks with n U rows and M / U KV heads send: (R - 1) / (W - 1) of the plain ring's.
// Whatever the number of ranks, a rank of "ulysses" sends less than its own rows of q, k, v and out: O(n).
#include <algorithm>
#include <numeric>
#include <utility>

#include "ringspan/plan/schedules/builder.h"
#include "ringspan/plan/schedules/ring.h"
#include "ringspan/plan/schedules/schedules.h"

namespace ringspan::detail {

std::vector<HeadBlock> heads_of_place(const Problem& problem, int64_t place, int64_t team_size) {
  const int64_t ratio = problem.heads_per_kv();
  const int64_t end = (place + 1) * problem.q_heads / team_size;
  int64_t head = place * problem.q_heads / team_size;
  std::vector<HeadBlock> blocks;
  while (head < end) {
    HeadBlock block{.q_begin = head, .kv_begin = head / ratio};
    // Whole groups of query heads make one block; what is cut off at either side has one KV head.
    const bool starts_group = head % ratio == 0 && end - head >= ratio;
    block.q_end = starts_group ? end / ratio * ratio : std::min(end, (head / ratio + 1) * ratio);
    block.kv_end = (block.q_end - 1) / ratio + 1;
    head = block.q_end;
    blocks.push_back(block);
  }
  return blocks;
}

namespace {

// The teams of a plan and what the ranks of this one hold after the exchange of heads, worked out once for all pairs.
class Teams {
 public:
  Teams(const Plan& plan, const RankPlan& part, int64_t size)
      : plan_(plan),
        part_(part),
        size_(size),
        mine_(part.rank / size),
        q_(rows_of_side(false)),
        kv_(rows_of_side(true)) {}

  int64_t count() const { return part_.world / size_; }
  int64_t mine() const { return mine_; }
  int64_t place() const { return part_.rank % size_; }
  int64_t size() const { return size_; }

  std::vector<int64_t> ranks(int64_t team) const {
    std::vector<int64_t> ranks(static_cast<size_t>(size_));
    std::iota(ranks.begin(), ranks.end(), team * size_);
    return ranks;
  }
  std::vector<int64_t> my_ranks() const { return ranks(mine_); }

  const Rows& q_rows() const { return q_.team.buffer; }
  Rows kv_rows(int64_t team) const {
    return team == mine_ ? kv_.team.buffer : in_sequence(plan_.kv_map(), ranks(team)).buffer;
  }

  // Of ranks of this team. The buffer [1], where the rows of `owner` lie in it, and where the heads of all buffers of
  // earlier ranks end.
  const Operand& gathered(bool of_kv, int64_t holder) const { return side(of_kv).gathered[holder % size_]; }
  const std::vector<Piece>& pieces(bool of_kv, int64_t owner) const { return side(of_kv).team.pieces[owner % size_]; }
  int64_t earlier_heads_end(bool of_kv, int64_t rank) const { return side(of_kv).earlier_heads_end[rank % size_]; }
  Operand own(bool of_kv, int64_t rank) const { return of_kv ? kv_shard(part_, rank) : q_shard(part_, rank); }

 private:
  struct SideRows {
    TeamRows team{};
    std::vector<Operand> gathered{};           // by place
    std::vector<int64_t> earlier_heads_end{};  // by place
  };

  const SideRows& side(bool of_kv) const { return of_kv ? kv_ : q_; }

  SideRows rows_of_side(bool of_kv) const {
    SideRows side{.team = in_sequence(of_kv ? plan_.kv_map() : plan_.q_map(), my_ranks())};
    int64_t heads_end = 0;
    for (int64_t place = 0; place < size_; ++place) {
      Operand operand{.slot = 1, .owner = kSeveral, .rows = side.team.buffer.count};
      const std::vector<HeadBlock> blocks = heads_of_place(part_.problem, place, size_);
      if (!blocks.empty()) {
        operand.head_begin = of_kv ? blocks.front().kv_begin : blocks.front().q_begin;
        operand.head_end = of_kv ? blocks.back().kv_end : blocks.back().q_end;
      }
      side.gathered.push_back(operand);
      side.earlier_heads_end.push_back(heads_end);
      heads_end = std::max(heads_end, operand.head_end);
    }
    return side;
  }

  const Plan& plan_;
  const RankPlan& part_;
  int64_t size_, mine_;
  SideRows q_, kv_;
};

// The exchanges of heads within this rank's team.
class HeadExchange {
 public:
  HeadExchange(const RankPlan& part, const Teams& teams) : part_(part), teams_(teams) {}

  // Rows of every rank into the buffer of the one that computes their heads.
  std::vector<Transfer> scatter(const std::vector<Payload>& payloads) const {
    std::vector<Transfer> transfers;
    transfers.reserve(2 * static_cast<size_t>(teams_.size()) * payloads.size());
    for_each_pair([&](int64_t src, int64_t dst) {
      for (const Payload payload : payloads) {
        const bool of_kv = is_of_kv(payload);
        Route route{.needed_by = 1,
                    .src = src,
                    .dst = dst,
                    .owner = src,
                    .from = teams_.own(of_kv, src),
                    .to = teams_.gathered(of_kv, dst)};
        for (const Piece& piece : teams_.pieces(of_kv, src)) {
          route.to_row = piece.row, route.to_stride = piece.stride;
          transfers.push_back(transfer_of(part_, payload, route, {piece.rows}));
        }
      }
    });
    return transfers;
  }

  // Results or gradients of every rank's rows back to it.
  std::vector<Transfer> give_back(const std::vector<Payload>& payloads, int64_t step, int64_t needed_by) const {
    std::vector<Transfer> transfers;
    for_each_pair([&](int64_t src, int64_t dst) {
      for (const Payload payload : payloads) {
        const bool of_kv = is_of_kv(payload);
        Route route{.step = step,
                    .needed_by = needed_by,
                    .src = src,
                    .dst = dst,
                    .owner = dst,
                    .from = teams_.gathered(of_kv, src),
                    .to = teams_.own(of_kv, dst)};
        for (const Piece& piece : teams_.pieces(of_kv, dst)) {
          route.from_row = piece.row, route.from_stride = piece.stride;
          add_home(transfers, payload, route, piece.rows);
        }
      }
    });
    return transfers;
  }

 private:
  // Sends in the order of the places, then receives likewise, what stays among them.
  template <class Action>
  void for_each_pair(Action&& action) const {
    for (const int64_t other : teams_.my_ranks()) {
      if (other != part_.rank) action(part_.rank, other);
    }
    for (const int64_t other : teams_.my_ranks()) action(other, part_.rank);
  }

  // A head that several ranks give back: the first in rank order overwrites what lies there, the others add.
  void add_home(std::vector<Transfer>& transfers, Payload payload, const Route& route, const RowRange& rows) const {
    Transfer rest = transfer_of(part_, payload, route, {rows});
    const int64_t shared_end = is_gradient(payload) ? std::min(end_of_earlier(payload, route.src), rest.head_end) : 0;
    if (shared_end > rest.head_begin) {
      Transfer shared = rest;
      shared.head_end = shared_end;
      shared.adds = true;
      transfers.push_back(std::move(shared));
      rest.head_begin = shared_end;
    }
    transfers.push_back(std::move(rest));
  }

  // The end of the heads that ranks before `src` in the team give back.
  int64_t end_of_earlier(Payload payload, int64_t src) const {
    const int64_t end = teams_.earlier_heads_end(is_of_kv(payload), src);
    return heads_of(payload, part_.problem, {.head_end = end}).end;
  }

  const RankPlan& part_;
  const Teams& teams_;
};

Ring ring_of_teams(const RankPlan& part, const Teams& teams, const Plan& plan) {
  Ring ring{.size = teams.count(),
            .index = teams.mine(),
            .first_step = 1,
            .own = teams.gathered(true, part.rank),
            .staying = teams.gathered(false, part.rank),
            .inputs = kv_inputs()};
  for (int64_t team = 0; team < teams.count(); ++team) {
    const auto first = part.kv_rows.begin() + team * teams.size();
    ring.rows.push_back(std::accumulate(first, first + teams.size(), int64_t{0}));
  }
  ring.rank_of = [&teams](int64_t team) { return team * teams.size() + teams.place(); };
  const bool has_heads = !part.heads.empty();
  ring.tiles_with = [&teams, &plan, has_heads, &q = teams.q_rows()](int64_t team) {
    return has_heads ? tiles_between(plan, q, teams.kv_rows(team)) : std::vector<Tile>{};
  };
  return ring;
}

void compute_only_with_heads(const RankPlan& part, std::vector<Step>& steps) {
  for (Step& step : steps) step.computes = step.computes && !part.heads.empty();
}

void build_teams(const Plan& plan, RankPlan& part, int64_t team_size) {
  const Teams teams(plan, part, team_size);
  const HeadExchange exchange(part, teams);
  part.heads = heads_of_place(part.problem, teams.place(), team_size);
  part.q_padding = padding_of(teams.q_rows());
  Ring ring = ring_of_teams(part, teams, plan);
  const Step idle{.computes = false, .q = own_q(part), .kv = own_kv(part)};

  std::vector<Payload> inputs = forward_q_inputs(part.problem);
  const std::vector<Payload> kv = kv_inputs();
  inputs.insert(inputs.end(), kv.begin(), kv.end());
  part.forward.push_back(idle);
  part.forward.back().before = exchange.scatter(inputs);
  append_ring(part, ring, part.forward);
  part.forward.back().after = exchange.give_back(results(), ring.size, ring.size + 1);
  compute_only_with_heads(part, part.forward);

  inputs = backward_q_inputs(part.problem);
  inputs.insert(inputs.end(), kv.begin(), kv.end());
  part.backward.push_back(idle);
  part.backward.back().before = exchange.scatter(inputs);
  ring.gradients = kv_gradients();
  ring.tiles_with = [&part, &ring](int64_t team) {
    return part.forward[ring.first_step + wrap(ring.index - team, ring.size)].tiles;
  };
  append_ring(part, ring, part.backward);
  std::vector<Payload> gradients = q_gradients(part.problem);
  gradients.insert(gradients.end(), ring.gradients.begin(), ring.gradients.end());
  part.backward.push_back(idle);
  part.backward.back().step = ring.size + 1;
  part.backward.back().after = exchange.give_back(gradients, ring.size + 1, ring.size + 2);
  compute_only_with_heads(part, part.backward);
}

}  // namespace

void build_ulysses(const Plan& plan, RankPlan& part) { build_teams(plan, part, plan.world()); }
void build_hybrid(const Plan& plan, RankPlan& part) { build_teams(plan, part, plan.schedule().inner); }

}  // namespace ringspan::detail
