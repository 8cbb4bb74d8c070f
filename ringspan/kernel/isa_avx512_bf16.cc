// The kernels for AVX-512 with BF16: bf16 inputs stay bf16, two to a word, in every product.
#define RINGSPAN_ISA_NAMESPACE avx512_bf16
#define RINGSPAN_VECTOR_BYTES 64
#define RINGSPAN_ISA_BF16_DOT 1
#include "ringspan/kernel/kernels-inl.h"
