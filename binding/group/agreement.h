// Agreement: before a call sends data, the ranks make sure that they are in the same call (docs/agreement.md). A rank
// whose own arguments are bad says so instead, so that its peers raise too and nobody waits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "binding/base/group.h"
#include "binding/group/signature.h"
#include "binding/watch/flight_record.h"
#include "binding/watch/watch.h"

namespace ringspan::binding {

// How a tensor of pairs lies along the query rows, as bits: what this rank's tensor may be. A rank with a single row
// cannot tell; all ranks together settle it.
enum class RowReading : uint8_t { kNone = 0, kShared = 1, kByRows = 2, kEither = 3 };

enum class CallKind : int64_t { kForward, kBackward, kOther };

// What a rank is about to do.
struct Proposal {
  CallKind kind = CallKind::kForward;
  bool is_in_backward = false;  // of another kind than kBackward: made by autograd
  int64_t forward_number = 0;   // backward: the number that its forward got
  bool needs_grad = false;      // forward: a backward will follow
  uint64_t hash = 0;            // of all that must be the same on every rank
  std::string place{};          // where the program made the call; "" unknown
  uint64_t shared_content = 0;  // hash of what nothing else compares, where calls are debugged; 0 unknown
  // How tensors of pairs lie along the rows: those of all ranks together settle it.
  RowReading bias_rows = RowReading::kNone, mask_rows = RowReading::kNone;
  int64_t seed = 0;                    // of dropout; 0 without
  bool seed_is_drawn = false;          // nobody chose it: the one of rank 0 is taken
  std::function<Fields()> describe{};  // the same in words; called where the ranks differ
};

enum class RefusalKind : int64_t { kNone, kBadArgument, kUnsupported, kGaveUp, kFailed };

class LiveCall;
class Mailbox;
class Patience;

struct Agreed {
  int64_t seed = 0;  // of every rank
  // Shared or by rows; by rows where no rank could tell, for each then has its own row of it in either case.
  RowReading bias_rows = RowReading::kNone, mask_rows = RowReading::kNone;
  std::unique_ptr<LiveCall> call;
};

// One per process group; counts its calls. Thread-safe.
class Agreement : public std::enable_shared_from_this<Agreement> {
 public:
  // The one of a group. It is forgotten when the group has ended and another one comes.
  static std::shared_ptr<Agreement> of(const Group& group);
  // Those of all groups that were not forgotten.
  static std::vector<std::shared_ptr<Agreement>> all();

  explicit Agreement(const Group& group);
  ~Agreement();

  // Returns what they share where all ranks propose the same, and the call, which is under way until it is destroyed:
  // a group makes one call at a time. Else every rank throws: Error naming each argument that differs with its values
  // and ranks, the refusal of a rank, or DistBackendError naming the ranks that did not come within the deadline; the
  // group can be used again after each of these. DistBackendError naming the first that failed where the group is
  // closed, or is closed by what happens now.
  // Error where another thread than the first one makes a forward, until hand_over.
  Agreed agree(const Group& group, const Proposal& proposal);
  // A call whose caller vouches for what agree() makes sure of.
  std::unique_ptr<LiveCall> begin_unagreed(const Group& group, const Proposal& proposal);
  // Takes part in the next call by refusing it: the other ranks raise `message`, of which at most kMaxMessage bytes are
  // told. Nothing where this rank has taken part in a call since it had made `calls` of them: what was raised later
  // than that is no refusal.
  void refuse_since(const Group& group, RefusalKind kind, const std::string& message, int64_t calls) noexcept;

  // How many calls this rank has taken part in, refused ones among them.
  int64_t calls() const;
  // Forwards of the group belong to the next thread that makes one.
  void hand_over();
  // A call is over.
  void end_call();
  // No call of the group is possible any more. The first of these counts.
  void close(const Failure& failure);

  Watch& watch() { return *watch_; }
  FlightRecord& record() { return record_; }
  const std::string& group_name() const { return name_; }
  // The last call of each rank, as far as this one knows, in words.
  std::string last_calls() const;

  static constexpr size_t kMaxMessage = 4096;

 private:
  struct Owner {
    std::thread::id thread;
    std::string name;
  };

  std::unique_lock<std::timed_mutex> enter(const Group& group, const Proposal& proposal);
  void check_thread(const Group& group, const Proposal& proposal);
  void check_open() const;
  void leave(const Group& group, RefusalKind kind, const std::string& message) noexcept;
  std::vector<std::string> swap_headers(const Group& group, int64_t number, const Proposal& proposal,
                                        Patience& patience);
  [[noreturn]] void compare_in_words(const Group& group, int64_t number, const Proposal& proposal, Patience& patience);
  Awaited awaited(const Group& group, int64_t number, const Patience& patience);
  void check_refusals(int64_t number, const std::vector<std::string>& texts);
  void note_calls(const std::vector<std::string>& texts);
  std::string absent_in_words() const;

  const std::string name_;
  const int64_t process_;  // a forked child has neither the connections nor the threads
  mutable std::mutex mutex_;
  int64_t number_ = 0;
  std::optional<Owner> owner_;
  std::optional<Failure> closed_;
  std::vector<std::string> last_calls_;  // by rank
  std::timed_mutex in_call_;
  FlightRecord record_;
  std::unique_ptr<Watch> watch_;
  std::unique_ptr<Mailbox> mailbox_;
};

}  // namespace ringspan::binding
