// The portable kernels: vectors of 16 bytes, no intrinsics.
#define RINGSPAN_ISA_NAMESPACE generic
#define RINGSPAN_VECTOR_BYTES 16
#include "ringspan/kernel/kernels-inl.h"
