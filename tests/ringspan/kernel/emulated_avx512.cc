// The kernel text for AVX-512 F, BW, DQ and VL, compiled so that machines without it test it too.
#define RINGSPAN_ISA_NAMESPACE emulated_avx512
#define RINGSPAN_VECTOR_BYTES 64
#define RINGSPAN_INTRINSICS_HEADER "tests/ringspan/kernel/emulated_intrinsics.h"
#include "ringspan/kernel/kernels-inl.h"
