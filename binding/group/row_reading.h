// RowReading: how a tensor of pairs lies along the query rows. A rank with a single row cannot tell; all ranks together
// settle it (agreement.h).
#pragma once

#include <cstdint>

namespace ringspan::binding {

// Bits: what this rank's tensor may be.
enum class RowReading : uint8_t { kNone = 0, kShared = 1, kByRows = 2, kEither = 3 };

}  // namespace ringspan::binding
