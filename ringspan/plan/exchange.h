// Exchange: how the transfers of a plan are posted: by a torch backend as asked for, by the core's transports as kP2p.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ringspan/plan/plan.h"

namespace ringspan {

//   kAllToAll    one all_to_all for each post (below): what goes to a rank is one flat piece
//   kP2p         one message for each post and peer, the same pieces; nothing where it is empty
//   kAllGather   of schedule gather alone: a post of K/V is one all_gather, each rank's piece padded to the longest;
//                gradients as in kAllToAll
enum class Exchange : uint8_t { kAllToAll, kP2p, kAllGather };

std::string_view name_of(Exchange exchange);
// "all_to_all", "p2p", "all_gather", or "auto", which is all_to_all.
Exchange parse_exchange(std::string_view name);
std::vector<std::string_view> exchange_names();
// The names with what each is, for those who must choose one.
std::string exchange_help();

// Whether the exchange can carry the messages of a schedule; Error that says what can, where it cannot.
bool carries(Exchange exchange, const Schedule& schedule);
void check_exchange(Exchange exchange, const Schedule& schedule);
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
// Tells the messages of a pass apart, 8 a step. Those of a pair of ranks that have the same one keep their order.
int64_t tag_of(const Post& post);
// Whether the rows are all that the buffer of `place` holds.
bool fills_slot(const Transfer& transfer, const BufferPlace& place, const Problem& problem);
// Whether what arrives is all of its slot, so that the message may serve as the slot.
bool replaces_slot(const Transfer& transfer, const Problem& problem);

std::vector<Post> posts_of(std::span<const Transfer> transfers, const Problem& problem);

// Whether the post goes as one all_gather: each rank sends the same rows to every other one.
bool is_gathered(const Post& post, Exchange exchange);
// Of such a post: what each rank puts in, of a payload and in all, padded to the rank that has most.
int64_t padded_bytes(const Post& post, Payload payload, const Problem& problem);
int64_t gathered_bytes(const Post& post, const Problem& problem);

}  // namespace ringspan
