// Vectors of one instruction set: GCC/Clang vector extensions behind a few names, and the handful of intrinsics that
// those extensions cannot say. Included once by each isa_*.cc, which defines
//   RINGSPAN_ISA_NAMESPACE   the namespace that holds everything compiled with its flags,
//   RINGSPAN_VECTOR_BYTES    16, 32 or 64.
//
// Legend: a vector has `kLanes<T>` lanes; `p` is a pointer without alignment unless the name says so.
#pragma once

#include <cstdint>
#include <utility>

#if RINGSPAN_VECTOR_BYTES > 16
#ifdef RINGSPAN_INTRINSICS_HEADER
#include RINGSPAN_INTRINSICS_HEADER
#else
#include <immintrin.h>
#endif
#endif

// A test that emulates wide vectors defines both as nothing much, since code ten times as long compiles for minutes.
#ifndef RINGSPAN_INLINE
#define RINGSPAN_INLINE inline __attribute__((always_inline))
#define RINGSPAN_UNROLL _Pragma("GCC unroll 16")
#endif

namespace ringspan::RINGSPAN_ISA_NAMESPACE {

constexpr int kVectorBytes = RINGSPAN_VECTOR_BYTES;
template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef T unaligned __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
};
template <class T>
using Vector = typename VectorOf<T>::type;

using F32 = Vector<float>;
using F64 = Vector<double>;
using I32 = Vector<int32_t>;
using I64 = Vector<int64_t>;
using U32 = Vector<uint32_t>;

// Half as wide: the 16-bit elements that become one vector of fp32.
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
typedef uint16_t UnalignedHalves __attribute__((vector_size(kVectorBytes / 2), aligned(1), may_alias));

template <class T>
RINGSPAN_INLINE Vector<T> load(const T* p) {
  return *reinterpret_cast<const typename VectorOf<T>::unaligned*>(p);
}
template <class T>
RINGSPAN_INLINE void store(T* p, Vector<T> v) {
  *reinterpret_cast<typename VectorOf<T>::unaligned*>(p) = v;
}
// x - 0 is x for every x, so this is a plain broadcast.
template <class T>
RINGSPAN_INLINE Vector<T> splat(T x) {
  return x - Vector<T>{};
}

template <class T, int... kLane>
RINGSPAN_INLINE Vector<T> iota(std::integer_sequence<int, kLane...>) {
  return Vector<T>{static_cast<T>(kLane)...};
}
// 0, 1, 2, ...
template <class T>
RINGSPAN_INLINE Vector<T> iota() {
  return iota<T>(std::make_integer_sequence<int, kLanes<T>>{});
}

// `other` outside [first, last) of a row, for the vector whose first lane is column `col`.
template <class T>
RINGSPAN_INLINE Vector<T> keep_columns(Vector<T> v, int64_t col, int64_t first, int64_t last, T other = 0) {
  const Vector<T> lane = iota<T>();
  v = lane >= static_cast<T>(first - col) ? v : splat(other);
  return lane < static_cast<T>(last - col) ? v : splat(other);
}

// The larger one; `b` where either is NaN. (The maskz forms spare GCC 12 a false warning about an undefined register.)
RINGSPAN_INLINE F32 max(F32 a, F32 b) {
#if RINGSPAN_VECTOR_BYTES == 64
  return _mm512_maskz_max_ps(0xffff, a, b);
#elif RINGSPAN_VECTOR_BYTES == 32
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
RINGSPAN_INLINE F64 max(F64 a, F64 b) {
#if RINGSPAN_VECTOR_BYTES == 64
  return _mm512_maskz_max_pd(0xff, a, b);
#elif RINGSPAN_VECTOR_BYTES == 32
  return _mm256_max_pd(a, b);
#else
  return a > b ? a : b;
#endif
}

// Lane i of the result is lane i ^ kDistance of `v`.
template <int kDistance, class V, int... kLane>
RINGSPAN_INLINE V swap_lanes(V v, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(v, v, (kLane ^ kDistance)...);
}

template <class T, int kDistance = kLanes<T> / 2>
RINGSPAN_INLINE T reduce_max(Vector<T> v) {
  v = max(v, swap_lanes<kDistance>(v, std::make_integer_sequence<int, kLanes<T>>{}));
  if constexpr (kDistance > 1) {
    return reduce_max<T, kDistance / 2>(v);
  } else {
    return v[0];
  }
}
template <class T, int kDistance = kLanes<T> / 2>
RINGSPAN_INLINE T reduce_sum(Vector<T> v) {
  v += swap_lanes<kDistance>(v, std::make_integer_sequence<int, kLanes<T>>{});
  if constexpr (kDistance > 1) {
    return reduce_sum<T, kDistance / 2>(v);
  } else {
    return v[0];
  }
}

// a0 b0 a1 b1 ... of the first halves, then of the second ones.
template <class V, int... kLane>
RINGSPAN_INLINE V interleave_low(V a, V b, std::integer_sequence<int, kLane...>) {
  constexpr int kNum = sizeof...(kLane);
  return __builtin_shufflevector(a, b, (kLane % 2 ? kNum + kLane / 2 : kLane / 2)...);
}
template <class V, int... kLane>
RINGSPAN_INLINE V interleave_high(V a, V b, std::integer_sequence<int, kLane...>) {
  constexpr int kNum = sizeof...(kLane);
  return __builtin_shufflevector(a, b, (kLane % 2 ? kNum + (kNum + kLane) / 2 : (kNum + kLane) / 2)...);
}

// Transposes a square of lanes: log2(lanes) rounds that each interleave row i with row i + lanes / 2.
template <class T>
RINGSPAN_INLINE void transpose(Vector<T> (&rows)[kLanes<T>]) {
  constexpr int kNum = kLanes<T>;
  constexpr auto kAll = std::make_integer_sequence<int, kNum>{};
  RINGSPAN_UNROLL
  for (int distance = 1; distance < kNum; distance *= 2) {
    Vector<T> next[kNum];
    RINGSPAN_UNROLL
    for (int i = 0; i < kNum / 2; ++i) {
      next[2 * i] = interleave_low(rows[i], rows[i + kNum / 2], kAll);
      next[2 * i + 1] = interleave_high(rows[i], rows[i + kNum / 2], kAll);
    }
    RINGSPAN_UNROLL
    for (int i = 0; i < kNum; ++i) rows[i] = next[i];
  }
}

// e^x = 2^n 2^r with n = round(x log2 e), r = x log2 e - n. Adding 1.5 * 2^mantissa + bias leaves n + bias in the low
// bits; shifted up they are the exponent of 2^n. Below the clamp 2^n comes out as exactly 0 (so for -inf); NaN stays
// NaN; x at most 88 (fp64: 709). Polynomials: least relative error over |r| <= 1/2 with value 1 at 0, so exp(0) is 1.

// Relative error 2e-7 where the result is above 1e-4.
RINGSPAN_INLINE F32 exp(F32 x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kMagic = 12582912.0f + 127.0f;
  x = max(splat(-88.0f), x);
  const F32 shifted = x * kLog2E + kMagic;
  const F32 n = shifted - kMagic;
  const F32 r = x * kLog2E - n;
  const F32 power = reinterpret_cast<F32>(reinterpret_cast<I32>(shifted) << 23);
  F32 p = splat(1.3264724e-03f);
  p = p * r + 9.6715129e-03f;
  p = p * r + 5.5507338e-02f;
  p = p * r + 2.4022242e-01f;
  p = p * r + 6.9314698e-01f;
  p = p * r + 1.0f;
  return p * power;
}

// Relative error 3e-16; log2(e) in two parts, since x is as large as 700.
RINGSPAN_INLINE F64 exp(F64 x) {
  constexpr double kLog2E = 1.4426950408889634, kLog2ERest = 2.0355273740931033e-17;
  constexpr double kMagic = 6755399441055744.0 + 1023.0;
  x = max(splat(-709.4), x);
  const F64 shifted = x * kLog2E + kMagic;
  const F64 n = shifted - kMagic;
  const F64 r = x * kLog2ERest + (x * kLog2E - n);
  const F64 power = reinterpret_cast<F64>(reinterpret_cast<I64>(shifted) << 52);
  F64 p = splat(4.4348706364322698e-10);
  p = p * r + 7.0737736608536752e-09;
  p = p * r + 1.0178199054018334e-07;
  p = p * r + 1.3215435335653541e-06;
  p = p * r + 1.5252733493877460e-05;
  p = p * r + 1.5403530457010707e-04;
  p = p * r + 1.3333558146774585e-03;
  p = p * r + 9.6181291075941959e-03;
  p = p * r + 5.5504108664820079e-02;
  p = p * r + 2.4022650695910131e-01;
  p = p * r + 6.9314718055994533e-01;
  p = p * r + 1.0;
  return p * power;
}

// Relative error of a few units in the last place: near 0 a rational function (Cephes, Moshier 1989, tanh.c), else by
// exp, where 1 - tanh no longer cancels. NaN stays NaN.
template <class T>
RINGSPAN_INLINE Vector<T> tanh(Vector<T> x) {
  const Vector<T> size = x < 0 ? -x : x;
  const Vector<T> z = x * x;
  const Vector<T> p =
      (z * T(-9.64399179425052238628e-1) + T(-9.92877231001918586564e1)) * z + T(-1.61468768441708447952e3);
  const Vector<T> q =
      ((z + T(1.12811678491632931402e2)) * z + T(2.23548839060100448583e3)) * z + T(4.84406305325125486048e3);
  const Vector<T> near = x + x * z * (p / q);
  const Vector<T> e = exp(size * T(-2));
  const Vector<T> far = (T(1) - e) / (T(1) + e);
  return size < T(0.625) ? near : x < 0 ? -far : far;
}

// bf16 and fp16, rounded to nearest even like the hardware does.
RINGSPAN_INLINE F32 widen_bf16(const uint16_t* p) {
  const Halves bits = *reinterpret_cast<const UnalignedHalves*>(p);
  return reinterpret_cast<F32>(__builtin_convertvector(bits, U32) << 16);
}
RINGSPAN_INLINE void narrow_bf16(uint16_t* p, F32 v) {
  const U32 bits = reinterpret_cast<U32>(v);
  const U32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const U32 nan = (bits & 0x7fffffff) > 0x7f800000 ? (bits | 0x400000) : rounded;
  *reinterpret_cast<UnalignedHalves*>(p) = __builtin_convertvector(nan >> 16, Halves);
}
RINGSPAN_INLINE F32 widen_fp16(const uint16_t* p) {
#if RINGSPAN_VECTOR_BYTES == 64
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif RINGSPAN_VECTOR_BYTES == 32
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const U32 bits = __builtin_convertvector(*reinterpret_cast<const UnalignedHalves*>(p), U32);
  const U32 magnitude = (bits & 0x7fff) << 13;
  // Reading the fp16 exponent as an fp32 one is off by 2^112, also for subnormals.
  const U32 scaled = reinterpret_cast<U32>(reinterpret_cast<F32>(magnitude) * 0x1p112f);
  const U32 finite_or_not = magnitude >= (0x7c00u << 13) ? (magnitude | 0x7f800000) : scaled;
  return reinterpret_cast<F32>(finite_or_not | ((bits & 0x8000) << 16));
#endif
}
RINGSPAN_INLINE void narrow_fp16(uint16_t* p, F32 v) {
#if RINGSPAN_VECTOR_BYTES == 64
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif RINGSPAN_VECTOR_BYTES == 32
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const U32 bits = reinterpret_cast<U32>(v);
  const U32 magnitude = bits & 0x7fffffff;
  const U32 normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13;
  // Adding 0.5 shifts a subnormal's bits to the end of the mantissa and rounds them on the way.
  const U32 subnormal = reinterpret_cast<U32>(reinterpret_cast<F32>(magnitude) + 0.5f) - 0x3f000000;
  const U32 huge = magnitude > 0x7f800000 ? (0x7e00u | (magnitude >> 13 & 0x3ff)) : U32{} + 0x7c00u;
  const U32 finite = magnitude < 0x38800000 ? subnormal : normal;
  const U32 result = (magnitude >= 0x47800000 ? huge : finite) | (bits >> 16 & 0x8000);
  *reinterpret_cast<UnalignedHalves*>(p) = __builtin_convertvector(result, Halves);
#endif
}

// One byte for each lane.
RINGSPAN_INLINE U32 widen_bytes(const uint8_t* p) {
#if RINGSPAN_VECTOR_BYTES == 64
  return reinterpret_cast<U32>(
      _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif RINGSPAN_VECTOR_BYTES == 32
  return reinterpret_cast<U32>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return U32{p[0], p[1], p[2], p[3]};
#endif
}

#ifdef RINGSPAN_ISA_BF16_DOT
// acc + the dot products of the bf16 pairs in each 32-bit lane, in fp32.
RINGSPAN_INLINE F32 dot_pairs(F32 acc, U32 a, U32 b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
// Neighbouring elements of (first, second), as bf16, in one lane: word i = elements 2i and 2i + 1.
RINGSPAN_INLINE U32 pack_neighbours(F32 first, F32 second) {
  return reinterpret_cast<U32>(_mm512_cvtne2ps_pbh(second, first));
}
// word i = (low[i], high[i]) as bf16.
RINGSPAN_INLINE U32 pack_across(F32 low, F32 high) {
  return __builtin_convertvector(reinterpret_cast<Halves>(_mm512_cvtneps_pbh(low)), U32) |
         __builtin_convertvector(reinterpret_cast<Halves>(_mm512_cvtneps_pbh(high)), U32) << 16;
}
#endif

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
