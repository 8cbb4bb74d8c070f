#include "ringspan/plan/exchange.h"

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

}  // namespace ringspan
