// A forward call with few query rows per key/value head (decoding), see decode-inl.h.
#pragma once

#include "ringspan/kernel/attention.h"
#include "ringspan/kernel/call_support.h"

namespace ringspan::kernel {

// Whether the call has so few rows that packing keys and values would not pay.
bool is_decoding(const ForwardArgs& args);

// `args` has been checked and is_decoding().
void run_decode(const ForwardArgs& args, const CallResources& resources);

}  // namespace ringspan::kernel
