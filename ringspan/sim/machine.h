// Machine: what the simulator knows of the place where a plan runs. A JSON file; docs/simulator.md explains each field
// and how `ringspan fit` measures them.
//
//     node 0                     node 1
//     [rank 0]--node--[rank 1]   [rank 2]--node--[rank 3]        ranks_per_node 2
//         \_______________network______________/
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ringspan/base/dtype.h"

namespace ringspan {

// A message of n bytes takes latency_seconds + n / bytes_per_second. What a rank sends and what it receives over the
// links of one class go at the same time, each at this bandwidth.
struct LinkClass {
  double latency_seconds = 0;
  double bytes_per_second = 0;
  bool operator==(const LinkClass&) const = default;
};

// Of one rank that has a processor for itself. Work is counted as the ledger counts it: of kept pairs only.
struct KernelSpeed {
  DType dtype = DType::kF32;
  int64_t head_dim = 0;  // where it was measured; a call takes the nearest one
  double forward_flops_per_second = 0, backward_flops_per_second = 0;
  // What a tile costs besides, for each row of queries, keys and values of one head that it touches.
  double forward_row_seconds = 0, backward_row_seconds = 0;
  bool operator==(const KernelSpeed&) const = default;
};

struct Machine {
  std::string name;
  std::string source;               // where the figures come from
  int64_t ranks_per_node = 1;       // neighbours in rank order
  int64_t processors_per_node = 1;  // ranks of a node that can compute at once; more than that share them
  double memory_bytes = 0;          // that a rank has for the call, its tensors included; 0: unknown
  LinkClass node{}, network{};      // between ranks of a node, and of different ones
  double overlap = 1;               // share of a message's time that computing beside it does not feel, 0..1
  // Whether an all_to_all ends on a rank only when every rank has begun it (gloo), or when its peers have (NCCL).
  bool all_to_all_waits_for_all = false;
  double copy_bytes_per_second = 0;                            // within a rank: packing, unpacking, adding up
  double forward_call_seconds = 0, backward_call_seconds = 0;  // once a call: agreement, dispatch
  double step_seconds = 0;                                     // each step that computes
  std::vector<KernelSpeed> kernels{};

  // Error naming the field and its value unless all are usable.
  void check() const;
  // The entry of `dtype` whose head_dim is nearest; Error where there is none.
  const KernelSpeed& speed_of(DType dtype, int64_t head_dim) const;

  bool operator==(const Machine&) const = default;
};

// Every field must be there and no other; checked.
Machine machine_from_json(std::string_view text);
std::string to_json(const Machine& machine);

}  // namespace ringspan
