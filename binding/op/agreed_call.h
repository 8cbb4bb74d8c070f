// From an op's arguments to a call that all ranks have agreed on: checks, then agreement. Every op goes this way.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "binding/base/errors.h"
#include "binding/base/tensor_rules.h"
#include "binding/group/agreement.h"
#include "binding/group/live_call.h"
#include "binding/op/call.h"
#include "binding/op/run.h"

namespace ringspan::binding {

inline bool has_peers(const Group& group) { return group.size > 1 && !group.is_fake(); }

// Runs what comes before the agreement of a call, and tells the peers of any exception that leaves it, unless this rank
// has taken part in a call meanwhile: that one was told there. With `assume_agreed` nobody listens.
template <class Action>
auto tell_peers(const Group& group, bool assume_agreed, Action&& action) {
  if (!has_peers(group) || assume_agreed) return action();
  const std::shared_ptr<Agreement> agreement = Agreement::of(group);
  const int64_t calls = agreement->calls();
  try {
    return action();
  } catch (const std::exception& error) {
    const RefusalKind kind = is_unsupported(error) ? RefusalKind::kUnsupported : RefusalKind::kBadArgument;
    agreement->refuse_since(group, kind, message_of(error), calls);
    throw;
  } catch (...) {
    agreement->refuse_since(group, RefusalKind::kBadArgument, "an exception of unknown type", calls);
    throw;
  }
}

// Of a Meta kernel: a call that came there for one tensor on meta among others has peers that wait.
template <class Record>
void check_meta(const Record& record, const std::string& group_name, bool assume_agreed) {
  if (is_all_meta(record)) return;
  tell_peers(find_group(group_name), assume_agreed, [&] { throw_mixed_devices(record); });
}

// A call and its operands, checked and, by make_agreed, the same on every rank and under way.
struct PreparedCall {
  Call call;
  Operands operands;
  std::unique_ptr<LiveCall> live{};
};

// All but the seed checked. `more`: what else the arithmetic must give (step_backend.h).
PreparedCall prepare(const Group& group, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const CallArguments& arguments, std::vector<std::string> more = {});

// Agrees with the peers, fills in the seed, reads tensors of pairs as the ranks have settled it, and begins the call.
// Nothing is agreed on without peers, and where the caller vouches for them.
void make_agreed(PreparedCall& prepared, const CallArguments& arguments, CallKind kind, int64_t forward_number);

}  // namespace ringspan::binding
