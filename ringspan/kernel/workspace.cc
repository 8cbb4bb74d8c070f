#include "ringspan/kernel/workspace.h"

#include <cassert>
#include <cstdlib>
#include <new>
#include <utility>

#include <sys/mman.h>

namespace ringspan {
namespace {

// Blocks start and end on huge pages, so that the system can back all of a block with them.
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

std::size_t round_up_to_pages(std::size_t bytes) {
  const std::size_t pages = (bytes + kHugePageBytes - 1) / kHugePageBytes;
  return (pages == 0 ? 1 : pages) * kHugePageBytes;
}

}  // namespace

Workspace::~Workspace() { std::free(data_); }

std::byte* Workspace::reserve(std::size_t bytes) {
  assert(bytes <= kBudgetBytes);
  if (data_ != nullptr && bytes <= capacity_) return data_;

  // The old block goes first: both together could pass the budget.
  std::free(std::exchange(data_, nullptr));
  capacity_ = 0;
  const std::size_t rounded = round_up_to_pages(bytes);
  void* block = std::aligned_alloc(kHugePageBytes, rounded);
  if (block == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  // Only advice: a system without huge pages refuses it, and ordinary pages serve as well, only slower.
  (void)madvise(block, rounded, MADV_HUGEPAGE);
#endif
  data_ = static_cast<std::byte*>(block);
  capacity_ = rounded;
  return data_;
}

WorkspacePool::Lease::Lease(WorkspacePool& pool, std::unique_ptr<Workspace> workspace)
    : pool_(pool), workspace_(std::move(workspace)) {}

WorkspacePool::Lease::~Lease() {
  const std::lock_guard<std::mutex> lock(pool_.mutex_);
  if (pool_.idle_.size() < kMaxIdle) pool_.idle_.push_back(std::move(workspace_));
}

WorkspacePool::Lease WorkspacePool::take() {
  std::unique_ptr<Workspace> workspace;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      workspace = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (workspace == nullptr) workspace = std::make_unique<Workspace>();
  return Lease(*this, std::move(workspace));
}

void WorkspacePool::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.clear();
}

WorkspacePool& WorkspacePool::process() {
  // Never destroyed: a thread that outlives main may still give a workspace back.
  static WorkspacePool* pool = new WorkspacePool;
  return *pool;
}

}  // namespace ringspan
