// Tests under a sanitizer, which makes some of them twenty times slower. What it looks for, each code path shows in a
// part of the cases.
#pragma once

#include <cstdint>

namespace ringspan::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kIsSanitized = true;
#else
inline constexpr bool kIsSanitized = false;
#endif

// Whether case `number` is run: all are, or under a sanitizer one of `share`: a prime that no loop's length divides.
constexpr bool runs_case(int64_t number, int64_t share) { return !kIsSanitized || number % share == 0; }

}  // namespace ringspan::test
