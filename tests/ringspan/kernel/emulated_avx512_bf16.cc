// The kernel text for AVX-512 with BF16, compiled so that machines without it test it too. Its fp32 and fp64 parts are
// those of plain AVX-512.
#define RINGSPAN_ISA_NAMESPACE emulated_avx512_bf16
#define RINGSPAN_VECTOR_BYTES 64
#define RINGSPAN_ISA_BF16_DOT 1
#define RINGSPAN_INTRINSICS_HEADER "tests/ringspan/kernel/emulated_intrinsics.h"
#define RINGSPAN_INLINE inline
#define RINGSPAN_UNROLL
#include "ringspan/kernel/kernels-inl.h"
