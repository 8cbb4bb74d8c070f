// Exchange: how a torch backend posts the transfers of a plan. The core's own transports post each on its own.
#pragma once

#include <cstdint>
#include <string_view>

#include "ringspan/plan/plan.h"

namespace ringspan {

//   kAllToAll    one all_to_all a hop: K and V, or dK and dV, in one flat message to the next rank
//   kP2p         one message a hop, the same content; nothing where it is empty
//   kAllGather   forward hops of K/V become one all_gather in step 0, every shard padded to the longest; gradients as
//                in kAllToAll
enum class Exchange : uint8_t { kAllToAll, kP2p, kAllGather };

const char* name_of(Exchange exchange);
// "all_to_all", "p2p", "all_gather", or "auto", which is all_to_all.
Exchange parse_exchange(std::string_view name);
// Which way gradients of K/V take home: a collective is symmetric, so they leave with step 0.
GradRoute route_of(Exchange exchange, int64_t world);

}  // namespace ringspan
