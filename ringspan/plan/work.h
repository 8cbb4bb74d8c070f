// What the steps of a plan compute.
#pragma once

#include <cstdint>

#include "ringspan/plan/plan.h"

namespace ringspan {

// (query, key) pairs that the tiles of a step keep, of all batch entries and one head.
int64_t kept_pairs(const Step& step);

}  // namespace ringspan
