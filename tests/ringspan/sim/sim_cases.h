// A machine of round numbers, on which times can be worked out by hand.
#pragma once

#include "ringspan/sim/machine.h"

namespace ringspan::testing {

// 1e9 flops a second forward, half of it backward; 1 MB/s links without latency, nothing else costs anything.
inline Machine round_machine() {
  Machine machine{.name = "round", .source = "by hand", .ranks_per_node = 64, .processors_per_node = 64};
  machine.node = machine.network = {.latency_seconds = 0, .bytes_per_second = 1e6};
  machine.copy_bytes_per_second = 1e30;
  machine.kernels = {
      {.dtype = DType::kF32, .head_dim = 8, .forward_flops_per_second = 1e9, .backward_flops_per_second = 5e8}};
  return machine;
}

}  // namespace ringspan::testing
