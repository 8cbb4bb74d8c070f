// A backward call as waves over query rows x key/value rows of some key/value heads. Each wave packs its queries,
// runs one job per key/value block, then writes or adds its dQ, dK and dV to the caller's.
#pragma once

#include "ringspan/kernel/attention.h"
#include "ringspan/kernel/call_support.h"

namespace ringspan::kernel {

// `args` has been checked.
void run_backward(const BackwardArgs& args, const CallResources& resources);

}  // namespace ringspan::kernel
