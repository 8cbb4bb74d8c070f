// PyTorch's own threads for our kernels: a process never has two pools.
#pragma once

#include "ringspan/base/parallel.h"

namespace ringspan::binding {

// Inside a parallel region of PyTorch it runs on the calling thread.
const Parallel& torch_parallel();

}  // namespace ringspan::binding
