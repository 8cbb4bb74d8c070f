#include "ringspan/base/philox.h"

#include <algorithm>
#include <cmath>

namespace ringspan {
namespace {

constexpr int kRounds = 10;
constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;

uint32_t low(uint64_t value) { return static_cast<uint32_t>(value); }
uint32_t high(uint64_t value) { return static_cast<uint32_t>(value >> 32); }

}  // namespace

std::array<uint32_t, 4> philox4x32(const std::array<uint32_t, 4>& counter, const std::array<uint32_t, 2>& key) {
  std::array<uint32_t, 4> c = counter;
  std::array<uint32_t, 2> k = key;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = uint64_t{kMultiplier0} * c[0], product1 = uint64_t{kMultiplier1} * c[2];
    c = {high(product1) ^ c[1] ^ k[0], low(product1), high(product0) ^ c[3] ^ k[1], low(product0)};
    k = {k[0] + kWeyl0, k[1] + kWeyl1};
  }
  return c;
}

uint32_t draw_of_pair(uint64_t seed, uint64_t offset, uint64_t index) {
  const uint64_t group = index / 4;
  return philox4x32({low(offset), high(offset), low(group), high(group)}, {low(seed), high(seed)})[index % 4];
}

uint32_t keep_threshold(double dropout_p) {
  const double keep = std::ldexp(1.0, 24) - std::round(std::ldexp(dropout_p, 24));
  return static_cast<uint32_t>(std::min(std::ldexp(keep, 8), 4294967295.0));
}

}  // namespace ringspan
