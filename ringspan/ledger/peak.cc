// What lives in step s of a ring over W ranks; KVo is the K/V of owner o, dKVo its gradient, and o(s) = rank - s:
//
//   K/V         step 0: a flat copy of KVo(0) on its way, KVo(1) arriving
//               step s: KVo(s) being read and sent on, KVo(s+1) arriving          (last step: nothing arrives)
//   gradients   while step s computes:  dKVo(s) being added to, dKVo(s-1) still on its way
//               after it:               dKVo(s) on its way, dKVo(s+1) arriving
#include "ringspan/ledger/peak.h"

#include <algorithm>

namespace ringspan::detail {
namespace {

class Peak {
 public:
  Peak(const RankPlan& part, std::optional<Exchange> exchange)
      : part_(part),
        exchange_(exchange),
        longest_(*std::max_element(part.kv_rows.begin(), part.kv_rows.end())),
        element_(size_of(part.problem.dtype)),
        accumulator_(size_of(accumulator_of(part.problem.dtype))) {}

  int64_t forward() const {
    int64_t most = 0;
    for (int64_t s = 0; s < part_.world; ++s) most = std::max(most, kv(s));
    // A call of one step keeps its sums in registers and writes the output once.
    const bool sums_apart = part_.world > 1 && accumulator_ != element_;
    return out_elements() * (element_ + (sums_apart ? accumulator_ : 0)) + 3 * stats_bytes() + most;
  }

  int64_t backward() const {
    const Problem& p = part_.problem;
    int64_t most = 0;
    for (int64_t s = 0; s < part_.world; ++s) {
      most = std::max(most, kv(s) + std::max(gradient(s) + gradient(s - 1), gradient(s) + gradient(s + 1)));
    }
    const bool sums_apart = accumulator_ != element_;
    const bool sums_at_home = sums_apart && (part_.world == 1 || part_.grad_route == GradRoute::kFromNext);
    const int64_t dq = p.batch * p.q_heads * part_.q_rows[part_.rank] * p.qk_dim;
    return dq * (element_ + (sums_apart ? accumulator_ : 0)) + stats_bytes() + pair(part_.rank, element_) +
           (sums_at_home ? pair(part_.rank, accumulator_) : 0) + most;
  }

 private:
  int64_t owner(int64_t step) const { return ((part_.rank - step) % part_.world + part_.world) % part_.world; }
  int64_t pair_of_rows(int64_t rows, int64_t element) const {
    const Problem& p = part_.problem;
    return p.batch * p.kv_heads * rows * (p.qk_dim + p.v_dim) * element;
  }
  int64_t pair(int64_t owner, int64_t element) const { return pair_of_rows(part_.kv_rows[owner], element); }
  // The core's slots are made once, for the longest shard.
  int64_t slot(int64_t owner, int64_t element) const {
    return exchange_ ? pair(owner, element) : pair_of_rows(longest_, element);
  }
  int64_t out_elements() const {
    const Problem& p = part_.problem;
    return p.batch * p.q_heads * part_.q_rows[part_.rank] * p.v_dim;
  }
  int64_t stats_bytes() const {
    const Problem& p = part_.problem;
    return p.batch * p.q_heads * part_.q_rows[part_.rank] * accumulator_;
  }

  int64_t kv(int64_t step) const {
    if (part_.world == 1) return 0;
    if (exchange_ == Exchange::kAllGather) {
      return pair_of_rows(longest_, element_) * (part_.world + (step == 0 ? 1 : 0));
    }
    const int64_t arriving = step + 1 < part_.world ? slot(owner(step + 1), element_) : 0;
    // The core posts the caller's own tensors where they lie in one piece.
    const int64_t read = step > 0 ? slot(owner(step), element_) : exchange_ ? pair(part_.rank, element_) : 0;
    return read + arriving;
  }

  // dKV of the owner of `step` where it lies in a slot; steps 0..W travel or arrive, kFromNext begins with step 1.
  int64_t gradient(int64_t step) const {
    const int64_t first = part_.grad_route == GradRoute::kFromOwner ? 0 : 1;
    if (part_.world == 1 || step < first || step > part_.world) return 0;
    return slot(owner(step), accumulator_);
  }

  const RankPlan& part_;
  std::optional<Exchange> exchange_;
  int64_t longest_, element_, accumulator_;
};

}  // namespace

int64_t forward_peak_bytes(const RankPlan& part, std::optional<Exchange> exchange) {
  return Peak(part, exchange).forward();
}
int64_t backward_peak_bytes(const RankPlan& part, std::optional<Exchange> exchange) {
  return Peak(part, exchange).backward();
}

}  // namespace ringspan::detail
