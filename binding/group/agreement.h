// Agreement: before a call sends data, the ranks make sure that they are in the same call (docs/agreement.md). A rank
// whose own arguments are bad says so instead, so that its peers raise too and nobody waits.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "binding/base/group.h"
#include "binding/group/header.h"
#include "binding/group/proposal.h"
#include "binding/watch/flight_record.h"
#include "binding/watch/watch.h"

namespace ringspan::binding {

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
  // Error where another thread than the first one makes a forward, until hand_over. Forwards that a backward makes come
  // from whatever thread that runs in.
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
    int64_t thread = 0;
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
