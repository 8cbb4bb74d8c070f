// validate: proof that a plan computes the mask and that its messages meet.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "ringspan/plan/plan.h"

namespace ringspan {

// The faults of a plan, in words; empty = proven:
//   - every kept pair (of held query positions) is computed exactly once, forward and backward, and no other;
//   - what a step reads or sends has arrived in its slot, and no slot in flight or in use is written;
//   - each send has its receive in the same step with the same rows, and both list it alike;
//   - results and gradients of each row end at its owner, with the part of every step that adds to it once.
// Cost: near the number of tiles and transfers, whatever the lengths.
std::vector<std::string> validate(const Plan& plan, const MaskSpec& mask);
// The same over given parts (tests mutate them).
std::vector<std::string> validate(const Plan& plan, std::span<const RankPlan> parts, const MaskSpec& mask);

}  // namespace ringspan
