// A 64-bit hash of content, the same in every process. Four lanes, so that 8 bytes cost about a cycle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace ringspan::binding {

constexpr uint64_t mix(uint64_t value) {
  value ^= value >> 32;
  value *= 0xd6e8feb86659fd93ULL;
  value ^= value >> 32;
  value *= 0xd6e8feb86659fd93ULL;
  return value ^ (value >> 32);
}

inline uint64_t hash_text(std::string_view text) {
  uint64_t hash = text.size();
  for (const char letter : text) hash = mix(hash ^ static_cast<unsigned char>(letter));
  return hash;
}

inline uint64_t hash_words(std::span<const int64_t> words) {
  constexpr uint64_t kOdd[4] = {0x9e3779b97f4a7c15ULL, 0xbf58476d1ce4e5b9ULL, 0x94d049bb133111ebULL,
                                0xff51afd7ed558ccdULL};
  uint64_t lanes[4] = {1, 2, 3, 4};
  for (size_t i = 0; i < words.size(); ++i) {
    uint64_t& lane = lanes[i % 4];
    lane = (lane ^ static_cast<uint64_t>(words[i])) * kOdd[i % 4];
    lane ^= lane >> 29;
  }
  uint64_t hash = mix(words.size());
  for (uint64_t lane : lanes) hash = mix(hash ^ lane);
  return hash;
}

}  // namespace ringspan::binding
