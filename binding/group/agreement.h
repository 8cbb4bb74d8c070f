// Agreement: before a call sends data, the ranks make sure that they are in the same call (docs/agreement.md). A rank
// whose own arguments are bad says so instead, so that its peers raise too and nobody waits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "binding/group/group.h"
#include "binding/group/signature.h"

namespace ringspan::binding {

// How a tensor of pairs lies along the query rows, as bits: what this rank's tensor may be. A rank with a single row
// cannot tell; all ranks together settle it.
enum class RowReading : uint8_t { kNone = 0, kShared = 1, kByRows = 2, kEither = 3 };

enum class CallKind : int64_t { kForward, kBackward, kOther };

// What a rank is about to do.
struct Proposal {
  CallKind kind = CallKind::kForward;
  int64_t forward_number = 0;  // backward: the number that its forward got
  bool needs_grad = false;     // forward: a backward will follow
  uint64_t hash = 0;           // of all that must be the same on every rank
  // How tensors of pairs lie along the rows: those of all ranks together settle it.
  RowReading bias_rows = RowReading::kNone, mask_rows = RowReading::kNone;
  int64_t seed = 0;                  // of dropout; 0 without
  bool seed_is_drawn = false;        // nobody chose it: the one of rank 0 is taken
  std::function<Fields()> describe;  // the same in words; called where the ranks differ
};

struct Agreed {
  int64_t number = 0;  // of the call
  int64_t seed = 0;    // of every rank
  // Shared or by rows; by rows where no rank could tell, for each then has its own row of it in either case.
  RowReading bias_rows = RowReading::kNone, mask_rows = RowReading::kNone;
};

enum class RefusalKind : int64_t { kNone, kBadArgument, kUnsupported, kGaveUp };

class Mailbox;

// One per process group; counts its calls. Thread-safe.
class Agreement {
 public:
  // The one of a group. It is forgotten when the group has ended and another one comes.
  static std::shared_ptr<Agreement> of(const Group& group);

  explicit Agreement(std::unique_ptr<Mailbox> mailbox);
  ~Agreement();

  // Returns what they share where all ranks propose the same. Else every rank throws: Error naming each argument
  // that differs with its values and ranks, or the refusal of a rank; DistBackendError naming the ranks that did not
  // come within the group's timeout. The group can be used again after each of them.
  Agreed agree(const Group& group, const Proposal& proposal);
  // Takes part in the next call by refusing it: the other ranks raise `message`, of which at most kMaxMessage bytes are
  // told. Nothing where this rank has taken part in a call since it had made `calls` of them: what was raised later
  // than that is no refusal.
  void refuse_since(const Group& group, RefusalKind kind, const std::string& message, int64_t calls) noexcept;

  // How many calls this rank has taken part in, refused ones among them.
  int64_t calls() const;

  static constexpr size_t kMaxMessage = 4096;

 private:
  mutable std::mutex mutex_;
  int64_t number_ = 0;
  std::unique_ptr<Mailbox> mailbox_;
};

}  // namespace ringspan::binding
