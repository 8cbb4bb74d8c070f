#include "ringspan/plan/validate.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "ringspan/plan/proof/proof.h"

namespace ringspan {
namespace detail {

std::vector<std::string> Faults::take() {
  if (count_ > texts_.size()) texts_.push_back(concat("and ", count_ - texts_.size(), " more"));
  return std::move(texts_);
}

}  // namespace detail

namespace {

// Whether mask and parts answer this plan's question; without that nothing else is worth a look.
bool belong(const Plan& plan, std::span<const RankPlan> parts, const MaskSpec& mask, detail::Faults& faults) {
  const Problem& problem = plan.problem();
  if (mask.q_len() != problem.q_len || mask.kv_len() != problem.kv_len) {
    faults.add("the mask has ", mask.q_len(), " x ", mask.kv_len(), " positions, the problem ", problem.q_len, " x ",
               problem.kv_len);
  }
  if (mask.num_lists() != 1 && mask.num_lists() != problem.batch) {
    faults.add("the mask has ", mask.num_lists(), " batch entries, the problem ", problem.batch);
  }
  if (static_cast<int64_t>(parts.size()) != plan.world()) {
    faults.add("there are ", parts.size(), " parts for ", plan.world(), " ranks");
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    const RankPlan& part = parts[i];
    bool fits = part.world == plan.world() && part.rank == static_cast<int64_t>(i) && part.problem == problem &&
                part.schedule == plan.schedule() && part.grad_route == plan.grad_route() &&
                static_cast<int64_t>(part.q_rows.size()) == plan.world() &&
                static_cast<int64_t>(part.kv_rows.size()) == plan.world();
    for (int64_t rank = 0; fits && rank < plan.world(); ++rank) {
      fits = part.q_rows[rank] == plan.q_map().local_rows(rank) && part.kv_rows[rank] == plan.kv_map().local_rows(rank);
    }
    if (!fits) {
      faults.add("the part of rank ", part.rank, " of ", part.world, " (", part.problem.str(), ") is not part ", i,
                 " of this plan");
    }
  }
  return !faults.any();
}

// Blocks of heads keep the ratio of query heads to K/V heads.
void prove_heads(const RankPlan& part, detail::Faults& faults) {
  const int64_t ratio = part.problem.heads_per_kv();
  for (const HeadBlock& block : part.heads) {
    const int64_t q_heads = block.q_end - block.q_begin, kv_heads = block.kv_end - block.kv_begin;
    bool fits = q_heads > 0 && kv_heads > 0 && q_heads % kv_heads == 0 && block.q_begin >= 0 &&
                block.q_end <= part.problem.q_heads;
    for (int64_t head = 0; fits && head < q_heads; ++head) {
      fits = (block.q_begin + head) / ratio == block.kv_begin + head / (q_heads / kv_heads);
    }
    if (!fits) {
      faults.add("rank ", part.rank, ": query heads ", block.q_begin, "..", block.q_end, " do not read KV heads ",
                 block.kv_begin, "..", block.kv_end, ", with ", ratio, " query heads for each");
    }
  }
}

// Where some steps give one side's gradients alone, each side has to have all pairs.
void prove_work(const Plan& plan, const MaskSpec& mask, detail::Pass pass, std::vector<detail::Work> work,
                detail::Faults& faults) {
  using detail::Work;
  const bool is_whole =
      std::all_of(work.begin(), work.end(), [](const Work& one) { return one.gives_dq && one.gives_dkv; });
  if (is_whole) return detail::prove_pairs(plan, mask, pass, std::move(work), faults);
  for (bool Work::* gives : {&Work::gives_dq, &Work::gives_dkv}) {
    std::vector<Work> some;
    std::copy_if(work.begin(), work.end(), std::back_inserter(some), [&](const Work& one) { return one.*gives; });
    detail::prove_pairs(plan, mask, pass, std::move(some), faults);
  }
}

}  // namespace

std::vector<std::string> validate(const Plan& plan, const MaskSpec& mask) {
  std::vector<RankPlan> parts;
  for (int64_t rank = 0; rank < plan.world(); ++rank) parts.push_back(plan.rank(rank));
  return validate(plan, parts, mask);
}

std::vector<std::string> validate(const Plan& plan, std::span<const RankPlan> parts, const MaskSpec& mask) {
  detail::Faults faults;
  if (!belong(plan, parts, mask, faults)) return faults.take();
  for (const RankPlan& part : parts) prove_heads(part, faults);
  constexpr std::array kPasses{detail::Pass::kForward, detail::Pass::kBackward};
  for (const detail::Pass pass : kPasses) detail::prove_transfers(parts, pass, faults);
  // What follows looks into buffers, which must be what the transfers say.
  if (faults.any()) return faults.take();
  for (const detail::Pass pass : kPasses) {
    prove_work(plan, mask, pass, detail::prove_flow(plan, parts, pass, faults), faults);
  }
  return faults.take();
}

}  // namespace ringspan
