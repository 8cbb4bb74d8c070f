// A warning where a call without a shard map would be much better balanced with one (docs/python.md).
#pragma once

#include <cstdint>
#include <functional>

#include "binding/op/decode.h"

namespace ringspan::binding {

// Warns where another split would spare the busiest rank over a sixth of its work; once a process. `pattern` is the
// hash of what `decoded` gives, which is asked for the first 32 patterns only.
void warn_of_map(uint64_t pattern, const std::function<Decoded()>& decoded);

}  // namespace ringspan::binding
