// Loops that keep the multiply-add units, or the memory, busy. Included once per instruction set by peak.cc, which
// defines RINGSPAN_PEAK_NAMESPACE, RINGSPAN_PEAK_TARGET (attribute of the functions) and RINGSPAN_PEAK_BYTES.

namespace RINGSPAN_PEAK_NAMESPACE {

typedef float F32 __attribute__((vector_size(RINGSPAN_PEAK_BYTES), aligned(16), may_alias));

// 12 independent chains: more than latency x units of any core so far (4 x 2), and they fit into 16 registers.
RINGSPAN_PEAK_TARGET double run_multiply_adds(int64_t repeats) {
  constexpr int kChains = 12;
  F32 chains[kChains] = {};
  F32 factor = F32{} + 0.5f, addend = F32{} + 1.0f;
  // Hides the values: what is known at compile time would be computed there, and equal chains would become one.
  asm volatile("" : "+x"(factor), "+x"(addend));
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) asm volatile("" : "+x"(chains[c]));
  for (int64_t i = 0; i < repeats; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) chains[c] = chains[c] * factor + addend;
  }
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) asm volatile("" : : "x"(chains[c]));
  return static_cast<double>(repeats) * kChains * (RINGSPAN_PEAK_BYTES / sizeof(float)) * 2;
}

RINGSPAN_PEAK_TARGET inline void sum_vectors(const void* data, int64_t size_bytes) {
  constexpr int kSums = 8;
  F32 sums[kSums] = {};
  const F32* vectors = static_cast<const F32*>(data);
  const int64_t count = size_bytes / static_cast<int64_t>(sizeof(F32));
  for (int64_t i = 0; i + kSums <= count; i += kSums) {
#pragma GCC unroll 8
    for (int s = 0; s < kSums; ++s) sums[s] += vectors[i + s];
  }
#pragma GCC unroll 8
  for (int s = 0; s < kSums; ++s) asm volatile("" : : "x"(sums[s]));
}

}  // namespace RINGSPAN_PEAK_NAMESPACE

#undef RINGSPAN_PEAK_NAMESPACE
#undef RINGSPAN_PEAK_TARGET
#undef RINGSPAN_PEAK_BYTES
