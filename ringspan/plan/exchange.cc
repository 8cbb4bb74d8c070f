#include "ringspan/plan/exchange.h"

#include <algorithm>
#include <tuple>

#include "ringspan/base/error.h"

namespace ringspan {

namespace {

// All that is known of an exchange beside how it posts.
struct ExchangeInfo {
  Exchange kind;
  std::string_view name, what;
};
constexpr ExchangeInfo kExchanges[] = {
    {Exchange::kAllToAll, "all_to_all", "one collective for each post"},
    {Exchange::kP2p, "p2p", "one message to each peer"},
    {Exchange::kAllGather, "all_gather", "one collective that brings all K/V, with schedule gather"},
};

}  // namespace

std::string_view name_of(Exchange exchange) {
  for (const ExchangeInfo& info : kExchanges) {
    if (info.kind == exchange) return info.name;
  }
  throw Error(concat("exchange ", static_cast<int>(exchange), " is unknown"));
}

Exchange parse_exchange(std::string_view name) {
  if (name == "auto") return Exchange::kAllToAll;
  for (const ExchangeInfo& info : kExchanges) {
    if (info.name == name) return info.kind;
  }
  throw Error(concat("exchange is \"", name, "\"; use ", exchange_help()));
}

std::vector<std::string_view> exchange_names() {
  std::vector<std::string_view> names;
  for (const ExchangeInfo& info : kExchanges) names.push_back(info.name);
  return names;
}

std::string exchange_help() {
  std::string text = concat("auto (", name_of(parse_exchange("auto")), ")");
  for (const ExchangeInfo& info : kExchanges) text += concat(", ", info.name, " (", info.what, ")");
  return text;
}

bool carries(Exchange exchange, const Schedule& schedule) {
  return exchange != Exchange::kAllGather || schedule.kind == ScheduleKind::kGather;
}

void check_exchange(Exchange exchange, const Schedule& schedule) {
  RINGSPAN_CHECK(carries(exchange, schedule), "schedule is \"", name_of(schedule), "\" and exchange \"",
                 name_of(exchange),
                 "\", which brings all K/V at once; use schedule=\"gather\", exchange=\"all_gather\", or all_to_all or "
                 "p2p with this schedule");
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

bool fills_slot(const Transfer& t, const BufferPlace& place, const Problem& problem) {
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

int64_t tag_of(const Post& post) {
  constexpr int64_t kNumKinds = 4;
  return (post.transfers.front()->step * 2 + (post.gradients ? 1 : 0)) * kNumKinds + static_cast<int64_t>(post.kind);
}

bool is_gathered(const Post& post, Exchange exchange) { return exchange == Exchange::kAllGather && !post.gradients; }

int64_t padded_bytes(const Post& post, Payload payload, const Problem& problem) {
  int64_t most = 0;
  for (const Transfer* transfer : post.transfers) {
    if (transfer->payload == payload) most = std::max(most, bytes_of(*transfer, problem));
  }
  return most;
}

int64_t gathered_bytes(const Post& post, const Problem& problem) {
  return padded_bytes(post, Payload::kK, problem) + padded_bytes(post, Payload::kV, problem);
}

}  // namespace ringspan
