// Mailbox: how the ranks of a group swap short texts before a call. Two ways: through the group's store (small groups;
// no collective, an absent rank can be named), or by all_gather on the group's backend object.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "binding/group/group.h"

namespace ringspan::binding {

// Some ranks did not answer; `ranks` may be empty where that cannot be told.
class AbsentRanks : public std::runtime_error {
 public:
  AbsentRanks(std::vector<int64_t> ranks, const std::string& what)
      : std::runtime_error(what), ranks(std::move(ranks)) {}
  std::vector<int64_t> ranks;
};

class Mailbox {
 public:
  enum class Topic { kHeader, kDescription };

  virtual ~Mailbox() = default;

  // All ranks' texts in rank order. Every rank swaps the same topics of a call in the same order. AbsentRanks.
  virtual std::vector<std::string> swap(const Group& group, int64_t number, Topic topic, const std::string& mine) = 0;
  // Takes part in a swap without an interest in the others' texts.
  virtual void leave(const Group& group, int64_t number, Topic topic, const std::string& mine) = 0;
  // Puts another text in the place of the one of a swap that failed, for those who come later (where that can be done).
  virtual void replace(const Group& group, int64_t number, Topic topic, const std::string& mine) noexcept = 0;
};

// Above this size the store, which one process serves, is slower than all_gather.
constexpr int64_t kMaxStoreRanks = 64;

std::unique_ptr<Mailbox> make_mailbox(const Group& group);

}  // namespace ringspan::binding
