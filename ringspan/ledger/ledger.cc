#include "ringspan/ledger/ledger.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "ringspan/base/error.h"
#include "ringspan/plan/schedules/builder.h"
#include "ringspan/plan/slot_book.h"
#include "ringspan/plan/walk.h"

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

// Walks over a pass with the book that the stores keep, and asks it for the buffers that a computation writes to.
class PeakCounter {
 public:
  PeakCounter(const RankPlan& part, Exchange exchange, bool backward)
      : part_(part),
        backward_(backward),
        moves_dq_(backward && moves_dq(part)),
        book_(part, backward ? part.backward : part.forward, exchange) {}

  int64_t run(int64_t always) {
    book_.keep(always);
    walk(backward_ ? part_.backward : part_.forward, *this);
    return book_.most_bytes();
  }

  void post(std::span<const Transfer> transfers) { book_.post(transfers); }
  void wait(int64_t step, bool gradients) { book_.wait(step, gradients); }
  void compute(const Step& step) {
    if (!backward_) {
      for (const Payload payload : detail::results()) use(payload, step.q, step.q.slot);
      return;
    }
    if (step.dkv.is_computed()) {
      for (const Payload payload : {Payload::kDk, Payload::kDv}) use(payload, step.kv, step.dkv.slot);
    }
    if (!step.dq.is_computed()) return;
    use(Payload::kDq, step.q, step.dq.slot);
    if (part_.problem.bias.has_gradient()) use(Payload::kDbias, step.q, step.dq.slot);
    if (is_dq_apart(step, moves_dq_)) keep_apart(step.q);
  }

 private:
  void use(Payload payload, const Operand& operand, int64_t slot) {
    if (slot != kOwnSlot) book_.slot(payload, slot, operand.rows, heads_of(payload, part_.problem, operand));
  }

  // One buffer, for the largest.
  void keep_apart(const Operand& q) {
    const PayloadSize size = size_of(Payload::kDq, part_.problem);
    const int64_t bytes = size.batch * (q.head_end - q.head_begin) * q.rows * size.dim * size.element_bytes;
    if (bytes > apart_bytes_) book_.keep(bytes - apart_bytes_);
    apart_bytes_ = std::max(apart_bytes_, bytes);
  }

  const RankPlan& part_;
  bool backward_, moves_dq_;
  SlotBook book_;
  int64_t apart_bytes_ = 0;
};

int64_t computing_steps(const std::vector<Step>& steps) {
  return std::count_if(steps.begin(), steps.end(), [](const Step& step) { return step.computes; });
}

int64_t sum_bytes(const RankPlan& part) { return size_of(accumulator_of(part.problem.dtype)); }

bool sums_apart(const RankPlan& part) { return part.problem.dtype != accumulator_of(part.problem.dtype); }

int64_t forward_peak_bytes(const RankPlan& part, Exchange exchange) {
  const Problem& p = part.problem;
  const int64_t rows = p.batch * p.q_heads * part.q_rows[part.rank];
  int64_t always = rows * p.v_dim * size_of(p.dtype) + 3 * rows * sum_bytes(part);
  // A call of one step keeps its sums in registers and writes the output once.
  if (sums_apart(part) && computing_steps(part.forward) > 1) {
    for (const Step& step : part.forward) {
      if (!step.computes) continue;
      always += p.batch * (step.q.head_end - step.q.head_begin) * step.q.rows * p.v_dim * sum_bytes(part);
      break;
    }
  }
  return PeakCounter(part, exchange, false).run(always);
}

int64_t backward_peak_bytes(const RankPlan& part, Exchange exchange) {
  const Problem& p = part.problem;
  const int64_t q_rows = p.batch * p.q_heads * part.q_rows[part.rank];
  const int64_t kv_rows = p.batch * p.kv_heads * part.kv_rows[part.rank];
  const int64_t dq = q_rows * p.qk_dim, dkv = kv_rows * (p.qk_dim + p.v_dim);
  int64_t always = (dq + dkv) * size_of(p.dtype) + q_rows * sum_bytes(part);
  if (sums_apart(part)) {
    if (sums_at_home(part, Payload::kDq)) always += dq * sum_bytes(part);
    if (sums_at_home(part, Payload::kDk)) always += dkv * sum_bytes(part);
  }
  return PeakCounter(part, exchange, true).run(always);
}

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
  ledger.forward.peak_bytes = forward_peak_bytes(part, posted);
  ledger.backward.peak_bytes = backward_peak_bytes(part, posted);
  return ledger;
}

}  // namespace ringspan
