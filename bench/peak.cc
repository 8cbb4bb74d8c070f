// What this machine can do at most, for `share of peak`: fused multiply-adds and bf16 dot products per second of one
// core, and bytes read per second. A plain C interface, so that the driver loads it beside the library that it judges
// and measures both in turns. On more cores the driver calls it from as many threads.
#include <chrono>
#include <cstdint>
#include <cstring>

#define RINGSPAN_PEAK_NAMESPACE generic
#define RINGSPAN_PEAK_TARGET
#define RINGSPAN_PEAK_BYTES 16
#include "bench/peak_loop-inl.h"

#ifdef __x86_64__
#include <immintrin.h>

#define RINGSPAN_PEAK_NAMESPACE avx2
#define RINGSPAN_PEAK_TARGET __attribute__((target("avx2,fma")))
#define RINGSPAN_PEAK_BYTES 32
#include "bench/peak_loop-inl.h"

#define RINGSPAN_PEAK_NAMESPACE avx512
#define RINGSPAN_PEAK_TARGET __attribute__((target("avx512f")))
#define RINGSPAN_PEAK_BYTES 64
#include "bench/peak_loop-inl.h"
#endif

namespace {

constexpr int64_t kRepeats = 100000;

#ifdef __x86_64__
// 32 products and 32 sums an instruction.
__attribute__((target("avx512f,avx512bf16"))) double run_bf16_dots(int64_t repeats) {
  constexpr int kChains = 12;
  __m512 chains[kChains] = {};
  __m512bh x = {}, y = {};
  for (int64_t i = 0; i < repeats; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) {
      chains[c] = _mm512_dpbf16_ps(chains[c], x, y);
      // Else the loop, whose result never changes, would be removed.
      asm volatile("" : "+v"(chains[c]));
    }
  }
  return static_cast<double>(repeats) * kChains * 64;
}
#endif

using Loop = double (*)(int64_t);

Loop find_loop(const char* name) {
  if (std::strcmp(name, "generic") == 0) return generic::run_multiply_adds;
#ifdef __x86_64__
  if (std::strcmp(name, "avx2") == 0) return avx2::run_multiply_adds;
  if (std::strcmp(name, "avx512") == 0) return avx512::run_multiply_adds;
  if (std::strcmp(name, "bf16_dot") == 0) return run_bf16_dots;
#endif
  return nullptr;
}

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

extern "C" {

// Floating point operations per second of the calling thread, the best of the runs that fit into `seconds`. `name`:
// generic, avx2, avx512 (fp32) or bf16_dot; -1 for another name. The CPU must offer what is named.
double ringspan_peak_flops(const char* name, double seconds) {
  const Loop loop = find_loop(name);
  if (loop == nullptr) return -1;
  double best = 0;
  for (const double end = now_s() + seconds; now_s() < end;) {
    const double begin = now_s();
    const double flops = loop(kRepeats);
    const double rate = flops / (now_s() - begin);
    if (rate > best) best = rate;
  }
  return best;
}

// Bytes per second of reading `size_bytes` at `data` once, in the calling thread.
double ringspan_peak_read(const void* data, int64_t size_bytes) {
  const double begin = now_s();
  generic::sum_vectors(data, size_bytes);
  return static_cast<double>(size_bytes) / (now_s() - begin);
}
}
