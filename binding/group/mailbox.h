// Mailbox: how the ranks of a group swap short texts before a call. Two ways: through the group's store (small groups;
// no collective, an absent rank can be named), or by all_gather on the group's backend object.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "binding/base/group.h"
#include "binding/watch/patience.h"
#include "binding/watch/watch.h"

namespace ringspan::binding {

// No texts came, and nobody can say what the others know: the store or the connections are gone.
class LostTexts : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Topic : uint8_t { kHeader, kDescription };

// A text of one rank for all others.
struct Letter {
  int64_t number = 0;  // of the call
  Topic topic = Topic::kHeader;
  std::string text{};
};

class Mailbox {
 public:
  virtual ~Mailbox() = default;

  // All ranks' texts in rank order; every rank swaps the same topics of a call in the same order. What `patience` and
  // `awaited` (but for its keys) say holds while it waits: where this rank gives up, or one has failed, the text in the
  // place of the missing ones says so. LostTexts, and what `patience` throws: as it is where the group can be used
  // after that, else as WaitInterrupted.
  virtual std::vector<std::string> swap(const Group& group, const Letter& letter, Patience& patience,
                                        Awaited awaited) = 0;
  // Takes part in a swap without an interest in the others' texts.
  virtual void leave(const Group& group, const Letter& letter) = 0;
  // A call has ended: until the next one nobody waits for this rank.
  virtual void end_call() = 0;
  // Whether texts of any length cost one message.
  virtual bool takes_long_texts() const = 0;
};

// Above this size the store, which one process serves, is slower than all_gather.
constexpr int64_t kMaxStoreRanks = 64;

// The group's store; null where it has none that can be used.
c10::intrusive_ptr<c10d::Store> store_of(const Group& group);

// `watch` lives as long as the mailbox.
std::unique_ptr<Mailbox> make_mailbox(const Group& group, Watch& watch);

}  // namespace ringspan::binding
