#include "ringspan/sim/pass_cost.h"

#include <algorithm>

#include "ringspan/ledger/ledger.h"

namespace ringspan::detail {
namespace {

class CostWriter {
 public:
  CostWriter(const RankPlan& part, Exchange exchange, const Machine& machine, bool keeps_silent_peers)
      : part_(part),
        exchange_(exchange),
        keeps_silent_peers_(keeps_silent_peers),
        machine_(machine),
        speed_(machine.speed_of(part.problem.dtype, std::max(part.problem.qk_dim, part.problem.v_dim))) {}

  PassCost write(const std::vector<Step>& steps, const PassLedger& ledger, bool backward) const {
    PassCost pass;
    for (size_t s = 0; s < steps.size(); ++s) {
      const Step& step = steps[s];
      StepCost cost{.computes = step.computes && !step.tiles.empty()};
      cost.adds_in_place = backward && step.q.slot == kOwnSlot;
      if (cost.computes) cost.seconds = compute_seconds(step, ledger.steps[s].flops, backward);
      cost.copy_before_seconds = local_seconds(step.before);
      cost.copy_after_seconds = local_seconds(step.after);
      cost.before = costs_of(step.before, step.step);
      cost.after = costs_of(step.after, step.step);
      pass.add(std::move(cost));
    }
    return pass;
  }

 private:
  double compute_seconds(const Step& step, int64_t flops, bool backward) const {
    int64_t rows = 0;
    for (const Tile& tile : step.tiles) rows += tile.q_rows + tile.kv_rows;
    const double rate = backward ? speed_.backward_flops_per_second : speed_.forward_flops_per_second;
    const double row_seconds = backward ? speed_.backward_row_seconds : speed_.forward_row_seconds;
    return machine_.step_seconds + static_cast<double>(flops) / rate +
           static_cast<double>(rows * part_.num_q_heads()) * row_seconds;
  }

  double copy_seconds(int64_t bytes) const { return static_cast<double>(bytes) / machine_.copy_bytes_per_second; }

  double local_seconds(const std::vector<Transfer>& transfers) const {
    int64_t bytes = 0;
    for (const Transfer& t : transfers) bytes += t.is_sent() ? 0 : bytes_of(t, part_.problem);
    return copy_seconds(bytes);
  }

  std::vector<PostCost> costs_of(const std::vector<Transfer>& transfers, int64_t step) const {
    std::vector<PostCost> costs;
    for (const Post& post : posts_of(transfers, part_.problem)) costs.push_back(cost_of_post(post, step));
    return costs;
  }

  PostCost cost_of_post(const Post& post, int64_t step) const {
    PostCost cost{.needed_after = post.needed_by - step, .gradients = post.gradients};
    const bool gathers = is_gathered(post, exchange_);
    const int64_t padded_k = gathers ? padded_bytes(post, Payload::kK, part_.problem) : 0;
    const int64_t padded_v = gathers ? padded_bytes(post, Payload::kV, part_.problem) : 0;
    for (const Transfer* t : post.transfers) {
      const bool sends = t->src == part_.rank;
      const int64_t bytes = bytes_of(*t, part_.problem);
      const int64_t moved = !gathers ? bytes : t->payload == Payload::kK ? padded_k : padded_v;
      cost.peers.push_back(sends ? PeerBytes{t->dst, moved, 0} : PeerBytes{t->src, 0, moved});
      if (sends && !gathers && !fills_slot(*t, t->from, part_.problem)) cost.pack_seconds += copy_seconds(bytes);
      if (!sends && !replaces_slot(*t, part_.problem)) cost.unpack_seconds += copy_seconds(bytes);
    }
    if (gathers) cost.pack_seconds = copy_seconds(padded_k + padded_v);
    join_peers(cost.peers);
    if (!keeps_silent_peers_) {
      std::erase_if(cost.peers, [](const PeerBytes& peer) { return peer.sent + peer.received == 0; });
    }
    return cost;
  }

  // One entry for each peer.
  static void join_peers(std::vector<PeerBytes>& peers) {
    std::sort(peers.begin(), peers.end(), [](const PeerBytes& a, const PeerBytes& b) { return a.peer < b.peer; });
    size_t count = 0;
    for (const PeerBytes& entry : peers) {
      if (count == 0 || peers[count - 1].peer != entry.peer) {
        peers[count++] = entry;
      } else {
        peers[count - 1].sent += entry.sent;
        peers[count - 1].received += entry.received;
      }
    }
    peers.resize(count);
  }

  const RankPlan& part_;
  Exchange exchange_;
  bool keeps_silent_peers_;
  const Machine& machine_;
  const KernelSpeed& speed_;
};

// What the caller holds during backward, which is the most: q, k, v, out, lse and dout; and a bias and a mask.
int64_t tensor_bytes(const RankPlan& part) {
  const auto bytes_of_payload = [&](Payload payload) {
    const PayloadSize size = size_of(payload, part.problem);
    return size.batch * size.heads * part.local_rows(payload, part.rank) * size.dim * size.element_bytes;
  };
  int64_t bytes = 0;
  for (const Payload payload : {Payload::kQ, Payload::kK, Payload::kV, Payload::kOut, Payload::kLse, Payload::kDout}) {
    bytes += bytes_of_payload(payload);
  }
  if (part.problem.bias.is_given()) bytes += bytes_of_payload(Payload::kBias);
  if (part.problem.mask.is_given()) bytes += bytes_of_payload(Payload::kMask);
  return bytes;
}

}  // namespace

void PassCost::add(StepCost cost) {
  // Kinds come back soon or not at all.
  constexpr size_t kLookedAt = 32;
  const size_t first = kinds_.size() - std::min(kLookedAt, kinds_.size());
  const auto found = std::find(kinds_.begin() + static_cast<int64_t>(first), kinds_.end(), cost);
  kind_of_.push_back(static_cast<size_t>(found - kinds_.begin()));
  if (found == kinds_.end()) kinds_.push_back(std::move(cost));
}

RankCost cost_of(const RankPlan& part, Exchange exchange, const Machine& machine, bool keeps_silent_peers) {
  const CostWriter writer(part, exchange, machine, keeps_silent_peers);
  const RankLedger ledger = ledger_of(part, exchange);
  return {.forward = writer.write(part.forward, ledger.forward, false),
          .backward = writer.write(part.backward, ledger.backward, true),
          .memory_bytes = tensor_bytes(part) + std::max(ledger.forward.peak_bytes, ledger.backward.peak_bytes)};
}

}  // namespace ringspan::detail
