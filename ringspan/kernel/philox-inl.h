// The draws of base/philox.h for a run of pairs, several counters at a time.
//
//      index      4g   4g+1 4g+2 4g+3 | 4g+4 ...         a vector holds one word of several counters g, g + 1, ...;
//      word       0    1    2    3    | 0                interleaving brings the words into the order of the pairs
#pragma once

#include "ringspan/kernel/simd-inl.h"

namespace ringspan::RINGSPAN_ISA_NAMESPACE {

using U64 = Vector<uint64_t>;

// The product of the low halves of each lane.
RINGSPAN_INLINE U64 multiply_low(U64 a, U64 b) {
#if RINGSPAN_VECTOR_BYTES == 64
  return reinterpret_cast<U64>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif RINGSPAN_VECTOR_BYTES == 32
  return reinterpret_cast<U64>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

// The key of each round, ready to be combined with a vector of counters; the offset's words likewise.
struct PhiloxKey {
  static constexpr int kRounds = 10;
  U64 round[kRounds][2];
  U64 offset[2];

  PhiloxKey(uint64_t seed, uint64_t counter_offset) {
    constexpr uint64_t kWeyl[2] = {0x9E3779B9, 0xBB67AE85};
    uint64_t word[2] = {seed & 0xffffffff, seed >> 32};
    for (auto& keys : round) {
      for (int i = 0; i < 2; ++i) {
        keys[i] = splat(word[i]);
        word[i] += kWeyl[i];
      }
    }
    offset[0] = splat(counter_offset & 0xffffffff);
    offset[1] = splat(counter_offset >> 32);
  }
};

// Four words for each counter whose upper half is `group`. The upper halves of the lanes hold anything.
RINGSPAN_INLINE void philox(const PhiloxKey& key, U64 group, U64 (&word)[4]) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  U64 c0 = key.offset[0], c1 = key.offset[1], c2 = group, c3 = group >> 32;
  RINGSPAN_UNROLL
  for (int i = 0; i < PhiloxKey::kRounds; ++i) {
    const U64 product0 = multiply_low(c0, splat(kMultiplier0)), product1 = multiply_low(c2, splat(kMultiplier1));
    c0 = (product1 >> 32) ^ c1 ^ key.round[i][0];
    c1 = product1;
    c2 = (product0 >> 32) ^ c3 ^ key.round[i][1];
    c3 = product0;
  }
  word[0] = c0;
  word[1] = c1;
  word[2] = c2;
  word[3] = c3;
}

RINGSPAN_INLINE U64 join_words(U64 low, U64 high) { return (low & 0xffffffff) | high << 32; }

// Keep masks of `4 * kLanes<uint64_t>` pairs from index 4 * group on.
RINGSPAN_INLINE void draw_groups(const PhiloxKey& key, uint64_t group, uint32_t threshold, uint32_t* keep) {
  constexpr int kGroups = kLanes<uint64_t>;
  using Lanes = std::make_integer_sequence<int, kGroups>;
  U64 word[4];
  philox(key, splat(group) + iota<uint64_t>(), word);
  const U64 first = join_words(word[0], word[1]), second = join_words(word[2], word[3]);
  const U32 low = reinterpret_cast<U32>(interleave_low(first, second, Lanes()));
  const U32 high = reinterpret_cast<U32>(interleave_high(first, second, Lanes()));
  store(keep, reinterpret_cast<U32>(low < threshold));
  store(keep + kLanes<uint32_t>, reinterpret_cast<U32>(high < threshold));
}

// keep[i] of the pairs with indices first + i.
RINGSPAN_INLINE void draw_run(const PhiloxKey& key, uint64_t first, int64_t count, uint32_t threshold, uint32_t* keep) {
  constexpr int64_t kPairs = 4 * kLanes<uint64_t>;
  // Vectors begin at whole groups, so the first and the last may reach beyond the run.
  uint32_t edge[kPairs];
  const auto skip = static_cast<int64_t>(first % 4);
  uint64_t group = first / 4;
  int64_t at = -skip;
  for (; at < count; at += kPairs, group += kPairs / 4) {
    if (at >= 0 && at + kPairs <= count) {
      draw_groups(key, group, threshold, keep + at);
      continue;
    }
    draw_groups(key, group, threshold, edge);
    const int64_t begin = at < 0 ? -at : 0, end = count - at < kPairs ? count - at : kPairs;
    for (int64_t i = begin; i < end; ++i) keep[at + i] = edge[i];
  }
}

// keep[i] of the pairs with indices first + i * step: a counter for each.
RINGSPAN_INLINE void draw_apart(const PhiloxKey& key, uint64_t first, uint64_t step, int64_t count, uint32_t threshold,
                                uint32_t* keep) {
  constexpr int kGroups = kLanes<uint64_t>;
  for (int64_t i = 0; i < count; i += kGroups) {
    const U64 index = (iota<uint64_t>() + static_cast<uint64_t>(i)) * step + first;
    U64 word[4];
    philox(key, index >> 2, word);
    for (int lane = 0; lane < kGroups && i + lane < count; ++lane) {
      const auto draw = static_cast<uint32_t>(word[index[lane] % 4][lane]);
      keep[i + lane] = draw < threshold ? ~uint32_t{0} : 0;
    }
  }
}

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
