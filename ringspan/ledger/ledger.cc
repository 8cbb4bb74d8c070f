#include "ringspan/ledger/ledger.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "ringspan/base/error.h"
#include "ringspan/ledger/peak.h"

namespace ringspan {
namespace {

template <class List, class Value>
int64_t sum_of(const List& list, Value&& value) {
  return std::accumulate(list.begin(), list.end(), int64_t{0},
                         [&](int64_t total, const auto& item) { return total + value(item); });
}

void add_sent(std::vector<SentTensor>& sent, Payload payload, int64_t bytes) {
  const auto found =
      std::find_if(sent.begin(), sent.end(), [&](const SentTensor& tensor) { return tensor.payload == payload; });
  if (found == sent.end()) {
    sent.push_back({payload, bytes});
  } else {
    found->bytes += bytes;
  }
}

class PassCounter {
 public:
  PassCounter(const RankPlan& part, Exchange exchange, bool backward)
      : part_(part), exchange_(exchange), backward_(backward) {}

  StepLedger count(const Step& step) const {
    StepLedger ledger{.step = step.step, .kept_pairs = ringspan::kept_pairs(step)};
    ledger.flops = ledger.kept_pairs * part_.num_q_heads() * flops_per_pair(step);
    add_list(step.before, ledger);
    add_list(step.after, ledger);
    return ledger;
  }

 private:
  // S and O forward; backward S and dP, and dQ, or dK and dV, or all three.
  int64_t flops_per_pair(const Step& step) const {
    const int64_t qk = 2 * part_.problem.qk_dim, v = 2 * part_.problem.v_dim;
    if (!backward_) return qk + v;
    return qk + v + (step.dq.is_computed() ? qk : 0) + (step.dkv.is_computed() ? qk + v : 0);
  }

  void add_list(const std::vector<Transfer>& transfers, StepLedger& ledger) const {
    for (const Transfer& transfer : transfers) {
      if (transfer.src != part_.rank || !transfer.is_sent()) continue;
      if (exchange_ == Exchange::kAllGather && !is_gradient(transfer.payload)) continue;
      const int64_t bytes = bytes_of(transfer, part_.problem);
      add_sent(ledger.sent, transfer.payload, bytes);
    }
    for (const Post& post : posts_of(transfers, part_.problem)) {
      ledger.messages += exchange_ == Exchange::kP2p ? messages_of(post) : 1;
      if (is_gathered(post, exchange_)) add_gathered(post, ledger);
    }
  }

  // Both sides know the sizes, so nothing empty is sent; a collective cannot leave it out.
  int64_t messages_of(const Post& post) const {
    std::set<int64_t> peers;
    for (const Transfer* transfer : post.transfers) {
      if (transfer->src == part_.rank && bytes_of(*transfer, part_.problem) > 0) peers.insert(transfer->dst);
    }
    return static_cast<int64_t>(peers.size());
  }

  void add_gathered(const Post& post, StepLedger& ledger) const {
    for (const Payload payload : {Payload::kK, Payload::kV}) {
      add_sent(ledger.sent, payload, (part_.world - 1) * padded_bytes(post, payload, part_.problem));
    }
  }

  const RankPlan& part_;
  Exchange exchange_;
  bool backward_;
};

}  // namespace

int64_t StepLedger::sent_bytes() const {
  return sum_of(sent, [](const SentTensor& tensor) { return tensor.bytes; });
}
int64_t PassLedger::sent_bytes() const {
  return sum_of(steps, [](const StepLedger& step) { return step.sent_bytes(); });
}
int64_t PassLedger::messages() const {
  return sum_of(steps, [](const StepLedger& step) { return step.messages; });
}
int64_t PassLedger::kept_pairs() const {
  return sum_of(steps, [](const StepLedger& step) { return step.kept_pairs; });
}
int64_t PassLedger::flops() const {
  return sum_of(steps, [](const StepLedger& step) { return step.flops; });
}

RankLedger ledger_of(const RankPlan& part, std::optional<Exchange> exchange) {
  RINGSPAN_CHECK(!exchange || part.grad_route == route_of(*exchange, part.world),
                 "ledger: the plan's grad_route is not that of exchange ", exchange ? name_of(*exchange) : "",
                 "; build the plan with route_of()");
  if (exchange) check_exchange(*exchange, part.schedule);
  const Exchange posted = exchange.value_or(Exchange::kP2p);
  RankLedger ledger{.rank = part.rank};
  const PassCounter forward(part, posted, false);
  for (const Step& step : part.forward) ledger.forward.steps.push_back(forward.count(step));
  const PassCounter backward(part, posted, true);
  for (const Step& step : part.backward) ledger.backward.steps.push_back(backward.count(step));
  ledger.forward.peak_bytes = detail::forward_peak_bytes(part, posted);
  ledger.backward.peak_bytes = detail::backward_peak_bytes(part, posted);
  return ledger;
}

}  // namespace ringspan
