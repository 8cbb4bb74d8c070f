#include "ringspan/plan/validate.h"

#include <utility>

#include "ringspan/plan/proof.h"

namespace ringspan {
namespace detail {

std::vector<std::string> Faults::take() {
  if (count_ > texts_.size()) texts_.push_back(concat("and ", count_ - texts_.size(), " more"));
  return std::move(texts_);
}

}  // namespace detail

namespace {

// Takes the parts in rank order.
class Validator {
 public:
  Validator(const Plan& plan, const MaskSpec& mask) : plan_(plan), mask_(mask), routes_(plan.world()) {
    const Problem& problem = plan.problem();
    if (mask.q_len() != problem.q_len || mask.kv_len() != problem.kv_len) {
      faults_.add("the mask has ", mask.q_len(), " x ", mask.kv_len(), " positions, the problem ", problem.q_len, " x ",
                  problem.kv_len);
      is_comparable_ = false;
    }
    if (mask.num_lists() != 1 && mask.num_lists() != problem.batch) {
      faults_.add("the mask has ", mask.num_lists(), " batch entries, the problem ", problem.batch);
      is_comparable_ = false;
    }
  }

  void add(const RankPlan& part) {
    if (!is_comparable_ || !belongs(part)) return;
    ++num_parts_;
    for (const detail::Phase& phase :
         {detail::Phase{part, part.forward, "forward"}, detail::Phase{part, part.backward, "backward"}}) {
      detail::prove_pairs(plan_, mask_, phase, faults_);
      detail::prove_slots(phase, faults_);
      meetings_.add(phase, faults_);
    }
    routes_.add({part, part.backward, "backward"});
  }

  std::vector<std::string> finish() {
    if (is_comparable_) {
      if (num_parts_ != plan_.world()) faults_.add("there are ", num_parts_, " parts for ", plan_.world(), " ranks");
      meetings_.finish(faults_);
      routes_.finish(faults_);
    }
    return faults_.take();
  }

 private:
  // Whether the part answers this plan's question; without that nothing else is worth a look.
  bool belongs(const RankPlan& part) {
    bool fits = part.world == plan_.world() && part.rank == num_parts_ && part.problem == plan_.problem() &&
                part.schedule == plan_.schedule() && part.grad_route == plan_.grad_route() &&
                static_cast<int64_t>(part.q_rows.size()) == plan_.world() &&
                static_cast<int64_t>(part.kv_rows.size()) == plan_.world();
    for (int64_t rank = 0; fits && rank < plan_.world(); ++rank) {
      fits =
          part.q_rows[rank] == plan_.q_map().local_rows(rank) && part.kv_rows[rank] == plan_.kv_map().local_rows(rank);
    }
    fits = fits && part.q_padding == padding_of(plan_.q_map(), part.rank);
    if (!fits) {
      faults_.add("the part of rank ", part.rank, " of ", part.world, " (", part.problem.str(), ") is not part ",
                  num_parts_, " of this plan");
    }
    return fits;
  }

  const Plan& plan_;
  const MaskSpec& mask_;
  detail::Faults faults_;
  detail::Meetings meetings_;
  detail::GradientRoutes routes_;
  bool is_comparable_ = true;
  int64_t num_parts_ = 0;
};

}  // namespace

std::vector<std::string> validate(const Plan& plan, const MaskSpec& mask) {
  Validator validator(plan, mask);
  for (int64_t rank = 0; rank < plan.world(); ++rank) validator.add(plan.rank(rank));
  return validator.finish();
}

std::vector<std::string> validate(const Plan& plan, std::span<const RankPlan> parts, const MaskSpec& mask) {
  Validator validator(plan, mask);
  for (const RankPlan& part : parts) validator.add(part);
  return validator.finish();
}

}  // namespace ringspan
