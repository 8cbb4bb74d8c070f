#include "ringspan/ledger/peak.h"

#include <algorithm>
#include <vector>

#include "ringspan/plan/schedules/builder.h"
#include "ringspan/plan/slot_book.h"
#include "ringspan/plan/walk.h"

namespace ringspan::detail {
namespace {

// Walks over a pass with the book that the stores keep, and asks it for the buffers that a computation writes to.
class Count {
 public:
  Count(const RankPlan& part, Exchange exchange, bool backward)
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
      for (const Payload payload : results()) use(payload, step.q, step.q.slot);
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
  void use(Payload payload, Operand operand, int64_t slot) {
    operand.slot = slot;
    if (slot != kOwnSlot) book_.slot(payload, operand);
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

}  // namespace

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
  return Count(part, exchange, false).run(always);
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
  return Count(part, exchange, true).run(always);
}

}  // namespace ringspan::detail
