// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"), one counter at a
// time, and the rule by which dropout uses it. docs/dropout.md has golden vectors.
//
//     key     = seed      as (low, high) 32-bit words
//     counter = (offset low, offset high, index / 4 low, index / 4 high)
//     the draw of pair `index` is word index % 4 of the result
#pragma once

#include <array>
#include <cstdint>

namespace ringspan {

std::array<uint32_t, 4> philox4x32(const std::array<uint32_t, 4>& counter, const std::array<uint32_t, 2>& key);

// 32 uniform bits for one pair.
uint32_t draw_of_pair(uint64_t seed, uint64_t offset, uint64_t index);

// A pair is kept where its draw is below this: 2^32 (1 - p) with p rounded to a multiple of 2^-24, at most 2^32 - 1.
// Why 2^-24: p arrives as 1 - 0.9 in double and as the same difference in fp32, and both must drop the same pairs.
// p in [0, 1).
uint32_t keep_threshold(double dropout_p);

}  // namespace ringspan
