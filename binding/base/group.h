// Group: the process group of one call, found by name at run time.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include <ATen/core/List.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ringspan::binding {

struct Group {
  std::string name;
  int64_t rank = 0, size = 1;  // places in the group, never global ranks
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  // For the tensors of the call; null where the group is written in Python and has no backend object.
  c10::intrusive_ptr<c10d::Backend> backend;
  at::DeviceType device = at::kCPU;
  std::string backend_name;

  // PyTorch's "fake" backend: collectives return at once and nobody answers.
  bool is_fake() const { return backend_name == "fake"; }
  std::chrono::milliseconds timeout() const;
};

// Error where no group has this name, or it has no backend for tensors of this device (none given: of any, the CPU
// first). "" is the group of this process alone.
Group find_group(const std::string& name, std::optional<at::DeviceType> device = std::nullopt);

// Whether this process is one of several of a job: then a call without a group is most likely one whose group was
// forgotten, and would attend to this rank's part of the sequence alone.
//
// Processes of the job as far as this one can tell: of the default process group, and where there is none, of the
// variables RANK and WORLD_SIZE. At most 0.2 us; a default group is seen a millisecond after it was made at the latest.
int64_t job_size();

// Error in a job of several processes: `what` was called without a group.
void check_alone(const char* what);

// One of `count` equal parts of something that is spread over groups, such as the batch: `index` is this process's.
struct Share {
  int64_t index = 0, count = 1;
};
// Spread over the first group, each part over the next, and so on. No names: the whole.
Share share_of(const std::optional<c10::List<std::string>>& group_names);

}  // namespace ringspan::binding
