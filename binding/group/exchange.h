// Messages between the ranks of a group over c10d: one flat tensor, of which each rank gets its piece, and one that
// holds a piece of each rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "binding/base/group.h"
#include "binding/group/live_call.h"

namespace ringspan::binding {

struct Message {
  at::Tensor send;                      // flat and dense, pieces in the order of the ranks
  std::vector<int64_t> sent, received;  // elements by rank
  int64_t tag = 0;
};

// A message on its way. `received` has its memory from the beginning and its content after finish(). Freed before that,
// as after a failure, it is kept by the call for as long as something may write to it.
struct Flight {
  at::Tensor sent{}, received{};
  std::vector<std::pair<int64_t, c10::intrusive_ptr<c10d::Work>>> works{};  // by peer, -1 for all
  bool is_functional = false;                                               // waited for by its result
};

// Failures leave as DistBackendError, by LiveCall::lose.
class FlatExchange {
 public:
  virtual ~FlatExchange() = default;
  virtual Flight start(const Message& message, LiveCall& call) = 0;
};
void finish(Flight& flight, LiveCall& call);

// One all_to_all for each message.
std::unique_ptr<FlatExchange> make_all_to_all(const Group& group);
// Send and receive. Unsupported where the group has no backend object.
std::unique_ptr<FlatExchange> make_p2p(const Group& group);
// `send` goes to every rank and has the same size on each; `sent` and `received` are not read.
std::unique_ptr<FlatExchange> make_all_gather(const Group& group);

// What this process has posted through c10d in a group since it began. Read by tests and the bench, which hold it
// against the ledger; nothing depends on it.
struct Traffic {
  int64_t messages = 0;  // a collective counts as one
  int64_t bytes = 0;     // to other ranks
};
Traffic traffic_of(const std::string& group_name);

// Whether everything that is posted from now on is also waited for at once, so that nothing travels while a step
// computes. For the bench, which measures what the overlap hides; changes no bit of any result.
void set_wait_at_post(bool waits);
bool waits_at_post();

}  // namespace ringspan::binding
