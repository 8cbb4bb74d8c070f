// Watch: what the ranks of a group tell each other through its store while some of them wait: who has failed first, how
// far each one is, and that one waits no longer. A thread of its own does it, which may be stuck with the store; nobody
// waits for it longer than he says.
//
// Every rank draws a number when it joins, and all of them together make the names of the group's keys, so that a group
// that lived on the store before is another one:
//
//     ringspan/join/<rank>      version, number, process, and the numbers that it has read of the others
//     ringspan/<all numbers>/failed       the first failure of the group: who, in which call, and its words
//     ringspan/<all numbers>/at/<rank>    how far a rank is that has been in a call for a while
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "binding/base/group.h"
#include "binding/watch/lane.h"
#include "binding/watch/peers.h"

namespace ringspan::binding {

// The first failure of a group, which ends it.
struct Failure {
  int64_t rank = -1;  // -1: nobody knows
  std::string words;
};

// How far a rank is.
struct Position {
  int64_t number = 0;  // of the call
  int64_t step = -1;   // -1: before the first
  int64_t count = 0;   // of everything that it has finished: another one is a sign of life
  bool waits = false;  // for others

  bool operator==(const Position&) const = default;
};

// The texts that a rank waits for, one of each rank under a key of the store. Where some will never come, a text in
// their place tells it to everybody who waits. The same text as the verdict, where whatever stands first counts for
// all, tells it to those who come late.
struct Awaited {
  std::vector<std::string> keys{};  // by rank, after the prefix
  std::string verdict{};            // key
  // What to put in the place of those that are missing: because a rank has failed, or because this one gives up.
  std::function<std::string(const Failure&)> text_of_failure;
  std::function<std::string(const std::vector<int64_t>& missing)> text_of_absence;
};

class Watch {
 public:
  // `store`: the group's, to which this makes connections of its own; null where it has none.
  Watch(const Group& group, c10::intrusive_ptr<c10d::Store> store);
  ~Watch();

  bool has_store() const;
  Peers& peers();

  // What all ranks have in common once they have joined.
  struct Joined {
    std::string prefix;  // of the names of all keys
    // A connection, for the one user who takes it.
    std::shared_ptr<c10::intrusive_ptr<c10d::Store>> store;
  };
  // Error where a rank runs another version.
  std::shared_future<Joined> joined() const;
  // Ranks of which this one has not heard, while they join.
  std::vector<int64_t> not_joined() const;

  // While this rank waits, the store is asked more often.
  class Attention {
   public:
    explicit Attention(Watch& watch, std::shared_ptr<const Awaited> awaited = nullptr);
    ~Attention();
    Attention(const Attention&) = delete;
    Attention& operator=(const Attention&) = delete;

   private:
    Watch& watch_;
  };
  // The wait of a receive that lasts is called off from time to time, so that its thread can look around.
  void set_receive(c10::intrusive_ptr<c10d::Work> receive);

  // As far as it is known by now.
  std::optional<Failure> failure() const;
  // Tells the group of a failure. The first one that was told, this or another; this one where the store does not
  // answer for `patience`.
  Failure report(const Failure& failure, std::chrono::milliseconds patience);
  // Says in the place of all that is missing that this rank waits no longer. False where not all have joined, so that
  // nobody can read it yet: it is said in this rank's own place then, before anything else is once they have.
  bool give_up(const std::shared_ptr<const Awaited>& awaited);

  // Puts `text` under a key, after the prefix, where nothing stands there yet; ready when that is done. Before all
  // ranks have joined it is kept until then.
  std::future<void> leave(const std::string& key, const std::string& text);

  // This rank's own position.
  void move_to(const Position& position);
  // Those of all ranks that said something, and when one of them last moved.
  struct Overview {
    std::vector<std::optional<Position>> positions;
    std::vector<int64_t> missing;  // of what is awaited, as far as it was asked
    std::chrono::steady_clock::time_point moved;
  };
  Overview overview() const;
  // Of the ranks but this one those that hold up the others, as far as it is known: those that have said nothing in
  // this call and those that compute, the least far of them; where all of them wait, the least far. None where nobody
  // said anything.
  std::vector<int64_t> last_ranks() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::unique_ptr<Lane> lane_;
};

}  // namespace ringspan::binding
