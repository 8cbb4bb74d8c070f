// The largest head dim that is offered, of q and k as of v and out.
#pragma once

#include <cstdint>

namespace ringspan {

constexpr int64_t kMaxHeadDim = 768;

}  // namespace ringspan
