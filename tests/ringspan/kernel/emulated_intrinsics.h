// The AVX-512 intrinsics that the kernels use, written with vector extensions and AVX2. The kernel text includes this
// instead of <immintrin.h> (RINGSPAN_INTRINSICS_HEADER) when a test compiles it for a machine without AVX-512. The
// functions live in the namespace of the kernels, where they hide the real ones.
#pragma once

#include <cstdint>

#include <immintrin.h>

// Without optimization this one is a macro.
#undef _mm512_cvtps_ph

namespace ringspan::RINGSPAN_ISA_NAMESPACE {

#define RINGSPAN_EMULATED inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t HalfWords __attribute__((vector_size(32)));

// The kernels ask for all lanes. `b` where either is NaN.
RINGSPAN_EMULATED __m512 _mm512_maskz_max_ps(int, __m512 a, __m512 b) { return a > b ? a : b; }
RINGSPAN_EMULATED __m512d _mm512_maskz_max_pd(int, __m512d a, __m512d b) { return a > b ? a : b; }

RINGSPAN_EMULATED __m512i _mm512_maskz_mul_epu32(int, __m512i a, __m512i b) {
  typedef uint64_t Longs __attribute__((vector_size(64)));
  const Longs low = (reinterpret_cast<Longs>(a) & 0xffffffff), other = (reinterpret_cast<Longs>(b) & 0xffffffff);
  return reinterpret_cast<__m512i>(low * other);
}

RINGSPAN_EMULATED __m512i _mm512_maskz_cvtepu8_epi32(int, __m128i bytes) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  return reinterpret_cast<__m512i>(__builtin_convertvector(reinterpret_cast<Bytes>(bytes), Words));
}

union Halved {
  __m512 whole;
  __m256 half[2];
};

RINGSPAN_EMULATED __m512 _mm512_maskz_cvtph_ps(int, __m256i bits) {
  Halved result;
  result.half[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(bits));
  result.half[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
  return result.whole;
}

// Rounds to nearest even, the only mode that the kernels ask for.
RINGSPAN_EMULATED __m256i _mm512_cvtps_ph(__m512 v, int) {
  Halved source;
  source.whole = v;
  return _mm256_set_m128i(_mm256_cvtps_ph(source.half[1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                          _mm256_cvtps_ph(source.half[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// The bf16 instructions read and write subnormal numbers as zeros.
RINGSPAN_EMULATED Words flush_subnormals(Words bits) { return (bits & 0x7F800000u) != 0 ? bits : bits & 0x80000000u; }

// The upper halves of the results.
RINGSPAN_EMULATED Words round_to_bf16(__m512 v) {
  const Words bits = flush_subnormals(reinterpret_cast<Words>(v));
  const Words rounded = bits + 0x7FFFu + (bits >> 16 & 1u);
  return ((bits & 0x7FFFFFFFu) > 0x7F800000u ? (bits | 0x400000u) : rounded) >> 16;
}

RINGSPAN_EMULATED __m256bh _mm512_cvtneps_pbh(__m512 v) {
  return reinterpret_cast<__m256bh>(__builtin_convertvector(round_to_bf16(v), HalfWords));
}

// The elements of `low` come first.
RINGSPAN_EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  union {
    __m512bh whole;
    __m256bh half[2];
  } result;
  result.half[0] = _mm512_cvtneps_pbh(low);
  result.half[1] = _mm512_cvtneps_pbh(high);
  return result.whole;
}

// acc + odd products, then + even products, each rounded once.
RINGSPAN_EMULATED __m512 _mm512_dpbf16_ps(__m512 acc, __m512bh a, __m512bh b) {
  const Words a_pairs = reinterpret_cast<Words>(a), b_pairs = reinterpret_cast<Words>(b);
  const Floats a_odd = reinterpret_cast<Floats>(flush_subnormals(a_pairs & 0xFFFF0000u));
  const Floats b_odd = reinterpret_cast<Floats>(flush_subnormals(b_pairs & 0xFFFF0000u));
  const Floats a_even = reinterpret_cast<Floats>(flush_subnormals(a_pairs << 16));
  const Floats b_even = reinterpret_cast<Floats>(flush_subnormals(b_pairs << 16));
  const Floats sum = a_even * b_even + (a_odd * b_odd + reinterpret_cast<Floats>(acc));
  return reinterpret_cast<__m512>(flush_subnormals(reinterpret_cast<Words>(sum)));
}

#undef RINGSPAN_EMULATED

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
