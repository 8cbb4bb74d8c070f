#include "ringspan/plan/exchange.h"

#include <algorithm>
#include <tuple>

#include "ringspan/base/error.h"

namespace ringspan {

const char* name_of(Exchange exchange) {
  switch (exchange) {
    case Exchange::kAllToAll: return "all_to_all";
    case Exchange::kP2p: return "p2p";
    case Exchange::kAllGather: return "all_gather";
  }
  throw Error(concat("exchange ", static_cast<int>(exchange), " is unknown"));
}

Exchange parse_exchange(std::string_view name) {
  if (name == "auto") return Exchange::kAllToAll;
  for (const Exchange exchange : {Exchange::kAllToAll, Exchange::kP2p, Exchange::kAllGather}) {
    if (name == name_of(exchange)) return exchange;
  }
  throw Error(concat("exchange is \"", name, "\"; it must be auto, all_to_all, p2p or all_gather"));
}

GradRoute route_of(Exchange exchange, int64_t world) {
  return exchange == Exchange::kP2p || world == 1 ? GradRoute::kFromNext : GradRoute::kFromOwner;
}

namespace {

// Inputs and sums of one element type travel together.
Post::Kind kind_of(Payload payload, const Problem& problem) {
  if (payload == Payload::kBias) return Post::Kind::kBias;
  if (payload == Payload::kMask) return Post::Kind::kMask;
  const bool is_sum = is_gradient(payload) || payload == Payload::kMax || payload == Payload::kSum ||
                      payload == Payload::kLse || payload == Payload::kDelta;
  return is_sum && problem.dtype != accumulator_of(problem.dtype) ? Post::Kind::kAccumulator : Post::Kind::kInput;
}

}  // namespace

bool fills_slot(const Transfer& t, const Place& place, const Problem& problem) {
  return place.slot != kOwnSlot && place.row == 0 && place.stride == 1 && place.rows == t.num_rows() &&
         place.head_begin == t.head_begin && place.head_end == t.head_end && t.batch_begin == 0 &&
         t.batch_end == size_of(t.payload, problem).batch;
}

bool replaces_slot(const Transfer& t, const Problem& problem) {
  return t.is_sent() && !t.adds && fills_slot(t, t.to, problem);
}

std::vector<Post> posts_of(std::span<const Transfer> transfers, const Problem& problem) {
  const auto key_of = [](const Post& post) { return std::tuple(post.gradients, post.needed_by, post.kind); };
  std::vector<Post> posts;
  for (const Transfer& transfer : transfers) {
    if (!transfer.is_sent()) continue;
    const Post post{kind_of(transfer.payload, problem), is_gradient(transfer.payload), transfer.needed_by};
    auto found =
        std::find_if(posts.begin(), posts.end(), [&](const Post& other) { return key_of(other) == key_of(post); });
    if (found == posts.end()) found = posts.insert(posts.end(), post);
    found->transfers.push_back(&transfer);
  }
  std::sort(posts.begin(), posts.end(), [&](const Post& a, const Post& b) { return key_of(a) < key_of(b); });
  return posts;
}

}  // namespace ringspan
