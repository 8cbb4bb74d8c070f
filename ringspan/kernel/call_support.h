// The ways to run a call, each in the file of its name, and what they share: views for the kernels, the split of the
// workspace, and the job loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "ringspan/base/parallel.h"
#include "ringspan/kernel/attention.h"
#include "ringspan/kernel/isa.h"
#include "ringspan/kernel/kernel_abi.h"
#include "ringspan/kernel/tile_index.h"
#include "ringspan/kernel/workspace.h"
#include "ringspan/view/tensor_view.h"

namespace ringspan::kernel {

// The workspace is split by sizes, never by the number of threads: how a call is cut into waves decides its bits.
constexpr int64_t kPackedBytes = int64_t{32} << 20;   // packed operands of a wave
constexpr int64_t kPartialBytes = int64_t{12} << 20;  // unfinished rows
constexpr int64_t kScratchBytes = int64_t{15} << 20;  // of all workers; with huge head dims fewer workers fit
constexpr int64_t kTableBytes = int64_t{1} << 20;     // flags and turns
static_assert(kPackedBytes + kPartialBytes + kScratchBytes + kTableBytes <=
              static_cast<int64_t>(Workspace::kBudgetBytes));

// A forward call, or one of few rows, with fewer jobs than this splits them along the keys. A fixed number, so that the
// bits don't depend on the threads.
constexpr int64_t kEnoughJobs = 32;

// What a call runs on, beside its arguments.
struct CallResources {
  const KernelTable& table;
  Workspace& workspace;
  const Parallel& parallel;
};

// `args` has been checked.
void run_forward(const ForwardArgs& args, const CallResources& resources);
void run_backward(const BackwardArgs& args, const CallResources& resources);

// Whether the call has so few rows that packing keys and values would not pay; runs one of these.
bool is_decoding(const ForwardArgs& args);
void run_decode(const ForwardArgs& args, const CallResources& resources);

// Runs the call and returns true where query blocks meet few keys. `wave` has the call's tensors, tiles and sizes.
bool run_narrow(const ForwardArgs& args, const CallResources& resources, const TileIndex& index,
                const ForwardWave& wave, int workers);

RawView raw_view(const ConstTensorView& view);
PairRule pair_rule(const PairInputs& pairs);

// The tensors and sizes of a call; everything else zero.
ForwardWave forward_wave(const ForwardArgs& args);

// The compute type for inputs of `dtype` on `isa`.
const KernelTable& table_for(Isa isa, DType dtype);

// Hands out aligned parts of one reservation. Made twice: once to count, once over the memory.
class Arena {
 public:
  explicit Arena(std::byte* base) : base_(reinterpret_cast<unsigned char*>(base)) {}
  unsigned char* take(int64_t bytes) {
    const int64_t at = used_;
    used_ += (bytes + 63) / 64 * 64;
    return base_ == nullptr ? nullptr : base_ + at;
  }
  int64_t used() const { return used_; }

 private:
  unsigned char* base_;
  int64_t used_ = 0;
};

// As many workers as there are threads, within kScratchBytes; one where `work` (multiply-adds) isn't worth waking any.
int count_workers(const Parallel& parallel, int64_t scratch_bytes, double work);

// Runs job(i, scratch of the worker) for i in [0, num_jobs), claimed in ascending order.
void run_jobs(const Parallel& parallel, int num_workers, int64_t num_jobs, unsigned char* scratch,
              int64_t scratch_bytes, const std::function<void(int64_t, unsigned char*)>& job);

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace ringspan::kernel
