// A forward call as waves. A wave is as many key/value heads, or as many rows of one, as fit packed into the
// workspace; it packs them in parallel, then runs its jobs, the heaviest first.
//
//   short keys:   wave 0 = heads 0..4 | wave 1 = heads 5..9         every job ends its rows
//   long keys:    wave 0 = head 0, rows [0, n) | wave 1 = head 0, rows [n, 2n) ...   rows go on in a state
#pragma once

#include "ringspan/kernel/attention.h"
#include "ringspan/kernel/call_support.h"

namespace ringspan::kernel {

// `args` has been checked.
void run_forward(const ForwardArgs& args, const CallResources& resources);

}  // namespace ringspan::kernel
