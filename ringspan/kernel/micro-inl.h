// The register tile: kRows x kCols sums that stay in registers while two packed operands stream by.
//
//            b  [depth][kCols]               Every matrix product of attention, forward and backward, is this loop;
//            +---------------+               only the strides of `a` differ, and those are compile-time constants.
//   a        |               |
//   +-----+  |  kCols wide   |               Peak needs 2 loads of b and kRows broadcasts of a per kRows x 2
//   |kRows|->|  = 2 vectors  |               multiply-adds: 6 x 2 fills AVX2's 16 registers, 8 x 2 is enough for
//   +-----+  +---------------+               AVX-512's 32, and 4 x 2 fits 16 registers without a fused operation.
//
// Legend: C = compute type (F32Compute, F64Compute, Bf16Compute); Acc = type of the sums; Word = what one step of the
// depth multiplies: one element, or two neighbouring bf16 elements (kPair = 2).
#pragma once

#include "ringspan/kernel/simd-inl.h"

namespace ringspan::RINGSPAN_ISA_NAMESPACE {

#if RINGSPAN_VECTOR_BYTES == 64
constexpr int kTileRows = 8;
#elif RINGSPAN_VECTOR_BYTES == 32
constexpr int kTileRows = 6;
#elif defined(__aarch64__)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif

template <class T>
struct PlainCompute {
  using Acc = T;
  using Row = T;  // element of a fetched row
  using Word = T;
  static constexpr int kPair = 1;
  static constexpr int kVectors = 2;
  static constexpr int kCols = kVectors * kLanes<T>;
  static constexpr int kRows = kTileRows;
  // q is multiplied by the scale when it is packed.
  static constexpr bool kScaleOnPack = true;

  static RINGSPAN_INLINE Vector<T> scale_packed(Vector<T> words, T factor) { return words * factor; }
  static RINGSPAN_INLINE Vector<T> multiply_add(T a, Vector<T> b, Vector<T> acc) { return a * b + acc; }
  // The same where a != 0; else `acc`, whatever b holds.
  static RINGSPAN_INLINE Vector<T> multiply_add_kept(T a, Vector<T> b, Vector<T> acc) {
    const Vector<T> kept = splat(a) != 0 ? b : Vector<T>{};
    return a * kept + acc;
  }
};
using F32Compute = PlainCompute<float>;
using F64Compute = PlainCompute<double>;

#ifdef RINGSPAN_ISA_BF16_DOT
struct Bf16Compute {
  using Acc = float;
  using Row = uint16_t;
  using Word = uint32_t;
  static constexpr int kPair = 2;
  static constexpr int kVectors = 2;
  static constexpr int kCols = kVectors * kLanes<float>;
  static constexpr int kRows = kTileRows;
  static constexpr bool kScaleOnPack = false;  // q keeps its exact bf16 value, but for the sign

  // Only the sign of the factor; its size is applied to the scores.
  static RINGSPAN_INLINE U32 scale_packed(U32 words, float factor) { return factor < 0 ? words ^ 0x80008000 : words; }
  static RINGSPAN_INLINE F32 multiply_add(uint32_t a, U32 b, F32 acc) { return dot_pairs(acc, splat(a), b); }
  static RINGSPAN_INLINE F32 multiply_add_kept(uint32_t a, U32 b, F32 acc) {
    const U32 low = (a & 0x7fff) != 0 ? U32{} + 0xffff : U32{};
    const U32 high = (a & 0x7fff0000) != 0 ? U32{} + 0xffff0000 : U32{};
    return dot_pairs(acc, splat(a), b & (low | high));
  }
};
#endif

// `kWide` vectors of columns: all of a panel, or its first.
template <class C, int kWide = C::kVectors>
struct RegisterTile {
  using Acc = typename C::Acc;
  static constexpr int kLane = kLanes<Acc>;
  Vector<Acc> v[C::kRows][kWide];

  RINGSPAN_INLINE void clear() {
    RINGSPAN_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      RINGSPAN_UNROLL
      for (int j = 0; j < kWide; ++j) v[i][j] = Vector<Acc>{};
    }
  }
  RINGSPAN_INLINE void load_from(const Acc* p, int64_t row_stride) {
    RINGSPAN_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      RINGSPAN_UNROLL
      for (int j = 0; j < kWide; ++j) v[i][j] = load(p + i * row_stride + j * kLane);
    }
  }
  RINGSPAN_INLINE void store_to(Acc* p, int64_t row_stride) const {
    RINGSPAN_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      RINGSPAN_UNROLL
      for (int j = 0; j < kWide; ++j) store(p + i * row_stride + j * kLane, v[i][j]);
    }
  }
  RINGSPAN_INLINE void scale_rows(const Acc* factors) {
    RINGSPAN_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      RINGSPAN_UNROLL
      for (int j = 0; j < kWide; ++j) v[i][j] = factors[i] * v[i][j];
    }
  }
};

// tile[i][.] += sum over k < depth of a[k * kStep + i * kRow] * b[k * kCols + .]
// kKeptOnly: terms whose `a` is 0 are left out, so that an inf or NaN in b can't reach a row that doesn't keep it.
template <class C, int kStep, int kRow, bool kKeptOnly = false, int kWide = C::kVectors>
RINGSPAN_INLINE void multiply_add(RegisterTile<C, kWide>& tile, const typename C::Word* a, const typename C::Word* b,
                                  int64_t depth) {
  // A local copy: the compiler keeps it in registers where it would spill the referenced tile.
  RegisterTile<C, kWide> sum = tile;
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    Vector<typename C::Word> column[kWide];
    RINGSPAN_UNROLL
    for (int j = 0; j < kWide; ++j) column[j] = load(b + j * kLanes<typename C::Word>);
    RINGSPAN_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      RINGSPAN_UNROLL
      for (int j = 0; j < kWide; ++j) {
        if constexpr (kKeptOnly) {
          sum.v[i][j] = C::multiply_add_kept(a[i * kRow], column[j], sum.v[i][j]);
        } else {
          sum.v[i][j] = C::multiply_add(a[i * kRow], column[j], sum.v[i][j]);
        }
      }
    }
    a += kStep;
    b += C::kCols;
  }
  tile = sum;
}

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
