// From strided rows of any element type to the packed operands of the register tile, and back. Only this file knows
// element types and strides.
//
//   columns form      rows -> [panel of kCols rows][word of the row][kCols]      b of Q K^T and dO V^T
//   row panels        rows -> [panel of kCols words][row][kCols]                 a of the same products
//   stacked panels    rows -> [panel of kCols elements][kPair rows][kCols]       b of P V, P^T dO, dS^T Q, dS K
//
// For kPair = 1 the last two are the same. Rows that no tile covers are packed as zeros and never read.
#pragma once

#include "ringspan/kernel/kernel_abi.h"
#include "ringspan/kernel/micro-inl.h"

namespace ringspan::RINGSPAN_ISA_NAMESPACE {

using kernel::Element;
using kernel::kCacheLine;
using kernel::RawView;
using Byte = unsigned char;

constexpr RINGSPAN_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr RINGSPAN_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
RINGSPAN_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
RINGSPAN_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Hands out aligned arrays one after the other. From a null base it only counts the bytes.
class Carver {
 public:
  explicit RINGSPAN_INLINE Carver(Byte* base) : base_(reinterpret_cast<uintptr_t>(base)) {}
  template <class T>
  RINGSPAN_INLINE T* take(int64_t count) {
    T* result = reinterpret_cast<T*>(base_ + static_cast<uintptr_t>(bytes_));
    bytes_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return result;
  }
  RINGSPAN_INLINE int64_t bytes() const { return bytes_; }

 private:
  uintptr_t base_;
  int64_t bytes_ = 0;
};

RINGSPAN_INLINE Byte* row_of(const RawView& view, int64_t batch, int64_t head, int64_t row) {
  return view.data + batch * view.stride[0] + head * view.stride[1] + row * view.stride[2];
}

RINGSPAN_INLINE void prefetch_row(const Byte* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(p + at, 0, 2);
}

inline __attribute__((noinline)) void fetch_ahead(kernel::Ahead& ahead) {
  int64_t lines = ahead.lines_per_tile;
  kernel::AheadRows* const lists[] = {&ahead.q, &ahead.k, &ahead.v};
  for (kernel::AheadRows* rows : lists) {
    for (; rows->count > 0; --rows->count, rows->next += rows->stride) {
      if (lines <= 0) return;
      prefetch_row(rows->next, rows->bytes);
      lines -= ceil_div(rows->bytes, kCacheLine);
    }
  }
}

constexpr RINGSPAN_INLINE int64_t bytes_of(Element element) {
  return element == Element::kF64 ? 8 : element == Element::kF32 ? 4 : 2;
}

template <class T>
RINGSPAN_INLINE T load_scalar(const Byte* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof(T));
  return value;
}
template <class T>
RINGSPAN_INLINE void store_scalar(Byte* p, T value) {
  __builtin_memcpy(p, &value, sizeof(T));
}

// Whether a row of the tensor is `padded` elements of T side by side (uint16_t: bf16).
template <class T>
RINGSPAN_INLINE bool lies_as(const RawView& view, int64_t padded) {
  constexpr Element kElement = sizeof(T) == 8 ? Element::kF64 : sizeof(T) == 4 ? Element::kF32 : Element::kBF16;
  return view.element == kElement && view.stride[3] == sizeof(T) && view.dim == padded;
}

// The row as it is, `dst` filled up with zeros to `padded` elements.
template <class T>
void copy_row(T* dst, const RawView& view, const Byte* row, int64_t padded) {
  if (view.stride[3] == sizeof(T)) {
    __builtin_memcpy(dst, row, static_cast<std::size_t>(view.dim) * sizeof(T));
  } else {
    for (int64_t d = 0; d < view.dim; ++d) dst[d] = load_scalar<T>(row + d * view.stride[3]);
  }
  for (int64_t d = view.dim; d < padded; ++d) dst[d] = 0;
}

RINGSPAN_INLINE void fetch_row(uint16_t* dst, const RawView& view, const Byte* row, int64_t padded) {
  copy_row(dst, view, row, padded);
}
RINGSPAN_INLINE void fetch_row(double* dst, const RawView& view, const Byte* row, int64_t padded) {
  copy_row(dst, view, row, padded);
}
// Widens bf16 and fp16. `padded` is a multiple of the lanes.
inline void fetch_row(float* dst, const RawView& view, const Byte* row, int64_t padded) {
  if (view.element == Element::kF32) return copy_row(dst, view, row, padded);
  uint16_t copy[kMaxHeadDim + kLanes<float>];
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(row);
  int64_t direct = view.dim / kLanes<float> * kLanes<float>;
  if (view.stride[3] != 2 || direct != padded) {
    copy_row(copy, view, row, padded);
    bits = copy;
    direct = padded;
  }
  if (view.element == Element::kBF16) {
    for (int64_t d = 0; d < direct; d += kLanes<float>) store(dst + d, widen_bf16(bits + d));
  } else {
    for (int64_t d = 0; d < direct; d += kLanes<float>) store(dst + d, widen_fp16(bits + d));
  }
}

template <class T>
void scatter_row(const RawView& view, Byte* row, const T* src) {
  if (view.stride[3] == sizeof(T)) {
    __builtin_memcpy(row, src, static_cast<std::size_t>(view.dim) * sizeof(T));
  } else {
    for (int64_t d = 0; d < view.dim; ++d) store_scalar(row + d * view.stride[3], src[d]);
  }
}

// `src` is readable up to a whole vector.
RINGSPAN_INLINE void store_row(const RawView& view, Byte* row, const double* src) { scatter_row(view, row, src); }
inline void store_row(const RawView& view, Byte* row, const float* src) {
  if (view.element == Element::kF32) return scatter_row(view, row, src);
  uint16_t bits[kMaxHeadDim + kLanes<float>];
  const bool bf16 = view.element == Element::kBF16;
  for (int64_t d = 0; d < view.dim; d += kLanes<float>) {
    bf16 ? narrow_bf16(bits + d, load(src + d)) : narrow_fp16(bits + d, load(src + d));
  }
  scatter_row(view, row, bits);
}

template <class T>
void add_row(const RawView& view, Byte* row, const T* src) {
  for (int64_t d = 0; d < view.dim; ++d) {
    Byte* p = row + d * view.stride[3];
    store_scalar(p, load_scalar<T>(p) + src[d]);
  }
}

// x * 0 is 0 for finite x only.
template <class T>
RINGSPAN_INLINE bool any_nonfinite(const T* p, int64_t padded) {
  Vector<T> sum{};
  for (int64_t d = 0; d < padded; d += kLanes<T>) sum += load(p + d) * T{0};
  return !(reduce_sum<T>(sum) == 0);
}
RINGSPAN_INLINE bool any_nonfinite(const uint16_t* p, int64_t padded) {
  uint16_t found = 0;
  for (int64_t d = 0; d < padded; ++d) found |= (p[d] & 0x7f80) == 0x7f80;
  return found != 0;
}

// Rows of one block that are to be packed. `covered` has one byte per row.
struct PackRows {
  const RawView* view;
  int64_t batch, head;
  int64_t begin, end;      // rows of the tensor; beyond `end` the block is filled up with zeros
  const uint8_t* covered;  // of row 0
};

template <class C>
struct PackedDims {
  int64_t elements;     // of a row
  int64_t words;        // ceil(elements / kPair)
  int64_t word_panels;  // of the row panels form
  int64_t panels;       // of the stacked form
  int64_t padded;       // elements of a fetched row, filled up to whole panels

  explicit RINGSPAN_INLINE PackedDims(int64_t dim)
      : elements(dim),
        words(ceil_div(dim, C::kPair)),
        word_panels(ceil_div(words, C::kCols)),
        panels(ceil_div(dim, C::kCols)),
        padded(word_panels * C::kCols * C::kPair) {}
};

// Row `row` of the range, filled up with zeros to dims.padded elements; zeros where it is not covered. Read in place
// where it already looks like that, else by way of `buffer`.
template <class C>
RINGSPAN_INLINE const typename C::Row* fetch_covered(typename C::Row* buffer, const PackRows& range, int64_t row,
                                                     const PackedDims<C>& dims) {
  using Row = typename C::Row;
  if (row >= range.end || !range.covered[row]) {
    __builtin_memset(buffer, 0, static_cast<std::size_t>(dims.padded) * sizeof(Row));
    return buffer;
  }
  const RawView& view = *range.view;
  const Byte* source = row_of(view, range.batch, range.head, row);
  if (lies_as<Row>(view, dims.padded)) return reinterpret_cast<const Row*>(source);
  fetch_row(buffer, view, source, dims.padded);
  return buffer;
}

// Columns form of `rows` rows (a multiple of kCols). `buffer` holds kLanes rows.
template <class C>
void pack_columns(typename C::Word* dst, const PackRows& range, int64_t rows, typename C::Row* buffer) {
  using Word = typename C::Word;
  constexpr int kNum = kLanes<Word>;
  const RawView& view = *range.view;
  const PackedDims<C> dims(view.dim);
  const Byte* first_row = row_of(view, range.batch, range.head, range.begin);
  for (int64_t row = 0; row < rows; row += kNum) {
    const Word* source[kNum];
    for (int i = 0; i < kNum; ++i) {
      // Rows side by side are an order that the hardware does not foresee (1.0 ns an element from memory, 0.77 with).
      prefetch_row(first_row + (row + kNum + i) * view.stride[2], view.dim * bytes_of(view.element));
      source[i] =
          reinterpret_cast<const Word*>(fetch_covered<C>(buffer + i * dims.padded, range, range.begin + row + i, dims));
    }
    Word* panel = dst + row / C::kCols * dims.words * C::kCols + row % C::kCols;
    for (int64_t w = 0; w < dims.words; w += kNum) {
      Vector<Word> square[kNum];
      RINGSPAN_UNROLL
      for (int i = 0; i < kNum; ++i) square[i] = load(source[i] + w);
      transpose<Word>(square);
      const int64_t count = smaller(kNum, dims.words - w);
      for (int64_t i = 0; i < count; ++i) store(panel + (w + i) * C::kCols, square[i]);
    }
  }
}

// Row panels form of one fetched row: dst points at the row inside its first panel.
template <class C>
RINGSPAN_INLINE void pack_row_panels(typename C::Word* dst, const typename C::Row* row, const PackedDims<C>& dims,
                                     int64_t panel_stride, typename C::Acc factor) {
  using Word = typename C::Word;
  const Word* words = reinterpret_cast<const Word*>(row);
  for (int64_t panel = 0; panel < dims.word_panels; ++panel) {
    RINGSPAN_UNROLL
    for (int j = 0; j < C::kVectors; ++j) {
      const Vector<Word> v = load(words + panel * C::kCols + j * kLanes<Word>);
      store(dst + panel * panel_stride + j * kLanes<Word>, C::scale_packed(v, factor));
    }
  }
}

// Stacked panels of kPair fetched rows.
template <class C>
RINGSPAN_INLINE void pack_stacked(typename C::Word* dst, const typename C::Row* const (&rows)[C::kPair],
                                  const PackedDims<C>& dims, int64_t panel_stride) {
  if constexpr (C::kPair == 1) {
    pack_row_panels<C>(dst, rows[0], dims, panel_stride, 1);
  } else {
    for (int64_t panel = 0; panel < dims.panels; ++panel) {
      for (int i = 0; i < C::kCols; ++i) {
        const int64_t d = panel * C::kCols + i;
        dst[panel * panel_stride + i] = rows[0][d] | static_cast<uint32_t>(rows[1][d]) << 16;
      }
    }
  }
}

// Stacked panels of `rows` rows. Returns whether inf or NaN was found.
template <class C>
bool pack_stacked_block(typename C::Word* dst, const PackRows& range, int64_t rows, int64_t panel_stride,
                        typename C::Row* buffer) {
  const PackedDims<C> dims(range.view->dim);
  bool nonfinite = false;
  for (int64_t row = 0; row < rows; row += C::kPair) {
    const typename C::Row* fetched[C::kPair];
    for (int i = 0; i < C::kPair; ++i) {
      fetched[i] = fetch_covered<C>(buffer + i * dims.padded, range, range.begin + row + i, dims);
      nonfinite |= any_nonfinite(fetched[i], dims.padded);
    }
    pack_stacked<C>(dst + row / C::kPair * C::kCols, fetched, dims, panel_stride);
  }
  return nonfinite;
}

// One row out of sums kept as [panel of kCols][row][kCols], times `factor`.
template <class C>
RINGSPAN_INLINE void gather_row(typename C::Acc* dst, const typename C::Acc* src, int64_t panels, int64_t panel_stride,
                                typename C::Acc factor) {
  using Acc = typename C::Acc;
  for (int64_t panel = 0; panel < panels; ++panel) {
    RINGSPAN_UNROLL
    for (int j = 0; j < C::kVectors; ++j) {
      // + 0: the sign of a zero may come from what a row's neighbours in the register tile added to it.
      store(dst + panel * C::kCols + j * kLanes<Acc>,
            factor * load(src + panel * panel_stride + j * kLanes<Acc>) + Acc{0});
    }
  }
}

}  // namespace ringspan::RINGSPAN_ISA_NAMESPACE
