// Workspace: scratch memory that lives across calls, on huge pages where the system gives them (page faults cost 7 %
// of a forward call without it). One call uses one workspace at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace ringspan {

class Workspace {
 public:
  // No kernel asks for more than this, whatever the problem.
  static constexpr std::size_t kBudgetBytes = std::size_t{60} << 20;

  Workspace() = default;
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // At least `bytes`, aligned to 64; what an earlier call wrote is gone. Grows, never shrinks.
  std::byte* reserve(std::size_t bytes);
  std::size_t capacity() const { return capacity_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
};

// A bounded, thread-safe store of idle workspaces: a call takes one and gives it back. At most kMaxIdle are kept.
class WorkspacePool {
 public:
  static constexpr std::size_t kMaxIdle = 4;

  class Lease {
   public:
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Workspace& operator*() const { return *workspace_; }

   private:
    friend class WorkspacePool;
    Lease(WorkspacePool& pool, std::unique_ptr<Workspace> workspace);
    WorkspacePool& pool_;
    std::unique_ptr<Workspace> workspace_;
  };

  Lease take();
  void clear();
  static WorkspacePool& process();  // the one that executors use

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Workspace>> idle_;
};

}  // namespace ringspan
