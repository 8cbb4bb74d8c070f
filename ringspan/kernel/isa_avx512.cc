// The kernels for AVX-512 F, BW, DQ and VL.
#define RINGSPAN_ISA_NAMESPACE avx512
#define RINGSPAN_VECTOR_BYTES 64
#include "ringspan/kernel/kernels-inl.h"
