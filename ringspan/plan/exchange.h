// Exchange: how a torch backend posts the transfers of a plan. The core's own transports post each on its own.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "ringspan/plan/plan.h"

namespace ringspan {

//   kAllToAll    one all_to_all for each post (below): what goes to a rank is one flat piece
//   kP2p         one message for each post and peer, the same pieces; nothing where it is empty
//   kAllGather   schedule ring: forward hops of K/V become one all_gather in step 0, every shard padded to the longest;
//                gradients as in kAllToAll
enum class Exchange : uint8_t { kAllToAll, kP2p, kAllGather };

const char* name_of(Exchange exchange);
// "all_to_all", "p2p", "all_gather", or "auto", which is all_to_all.
Exchange parse_exchange(std::string_view name);
// Which way gradients of K/V take home: a collective is symmetric, so they leave with step 0.
GradRoute route_of(Exchange exchange, int64_t world);

// What travels together: transfers of one list of a step whose tensors have one element type and that are needed by the
// same step. A list of which every rank has its part gives every rank the same posts, in the same order.
struct Post {
  enum class Kind : uint8_t { kInput, kAccumulator, kBias, kMask };

  Kind kind = Kind::kInput;
  bool gradients = false;
  int64_t needed_by = 0;
  std::vector<const Transfer*> transfers{};  // that are sent, in their order
};
// Whether the rows are all that the buffer of `place` holds.
bool fills_slot(const Transfer& transfer, const Place& place, const Problem& problem);
// Whether what arrives is all of its slot, so that the message may serve as the slot.
bool replaces_slot(const Transfer& transfer, const Problem& problem);

std::vector<Post> posts_of(std::span<const Transfer> transfers, const Problem& problem);

}  // namespace ringspan
