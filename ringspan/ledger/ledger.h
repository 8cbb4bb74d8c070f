// Ledger: what a plan sends, computes and holds, counted from its numbers; nothing runs.
//
// Schedule ring over 3 ranks, equal shards of n rows, what one rank sends in forward, in units of batch * kv_heads *
// (qk_dim + v_dim) * element size: n to the next rank in steps 0 and 1. Schedule gather: 2 n in step 0, n to each other
// rank; with exchange all_gather each shard is padded to the longest.
//
// The simplest case, one batch entry whose heads and dims give `hidden` for K and for V: every one of the ring's
// world - 1 rounds moves 2 * n * hidden * element bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ringspan/plan/exchange.h"
#include "ringspan/plan/plan.h"

namespace ringspan {

struct SentTensor {
  Payload payload = Payload::kK;
  int64_t bytes = 0;
  bool operator==(const SentTensor&) const = default;
};

struct StepLedger {
  int64_t step = 0;
  std::vector<SentTensor> sent{};  // in the order of posting, each tensor once
  int64_t messages = 0;            // posted by this rank; a collective counts as one
  // (query, key) pairs of all batch entries, one head. Backward of schedule invariant has each in two steps.
  int64_t kept_pairs = 0;
  int64_t flops = 0;  // of the query heads that this rank computes, docs/maths.md "Work"

  int64_t sent_bytes() const;
  bool operator==(const StepLedger&) const = default;
};

struct PassLedger {
  std::vector<StepLedger> steps{};
  // Most bytes that live at once beside the tensors that the caller gave: results, statistics, sums in the accumulator
  // type, and what travels. Without the kernels' workspace (at most Workspace::kBudgetBytes, whatever the lengths).
  int64_t peak_bytes = 0;

  int64_t sent_bytes() const;
  int64_t messages() const;
  int64_t kept_pairs() const;
  int64_t flops() const;
  bool operator==(const PassLedger&) const = default;
};

struct RankLedger {
  int64_t rank = 0;
  PassLedger forward{}, backward{};
  bool operator==(const RankLedger&) const = default;
};

// `exchange`: as the torch backend posts; the plan's grad_route must be the one of the exchange (route_of). Nothing: as
// the core's transports do, which is p2p with either route.
RankLedger ledger_of(const RankPlan& part, std::optional<Exchange> exchange);

// {"rank":, "forward": {"sent_bytes":, "messages":, "kept_pairs":, "flops":, "peak_bytes":, "steps": [{"step":,
// "sent": {"k":, "v":}, "messages":, "kept_pairs":, "flops":}]}, "backward": ...}
std::string to_json(const RankLedger& ledger);

}  // namespace ringspan
