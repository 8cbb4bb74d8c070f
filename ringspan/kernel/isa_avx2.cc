// The kernels for AVX2, FMA and F16C.
#define RINGSPAN_ISA_NAMESPACE avx2
#define RINGSPAN_VECTOR_BYTES 32
#include "ringspan/kernel/kernels-inl.h"
