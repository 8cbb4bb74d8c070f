// The way of every op from its arguments to a call that all ranks make: checks, then agreement.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "binding/agreement.h"
#include "binding/call.h"
#include "binding/errors.h"
#include "binding/run.h"

namespace ringspan::binding {

inline bool has_peers(const Group& group) { return group.size > 1 && !group.is_fake(); }

// Runs the checks of a call, and tells the peers where they fail.
template <class Check>
auto check_or_refuse(const Group& group, bool assume_agreed, Check&& check) {
  const auto refuse = [&](RefusalKind kind, const std::exception& error) {
    if (has_peers(group) && !assume_agreed) Agreement::of(group)->refuse(group, kind, message_of(error));
  };
  try {
    return check();
  } catch (const Unsupported& error) {
    refuse(RefusalKind::kUnsupported, error);
    throw;
  } catch (const std::exception& error) {
    refuse(RefusalKind::kBadArgument, error);
    throw;
  }
}

// The call and its operands, all but the seed checked. `more`: what else the arithmetic must give (step_backend.h).
std::pair<Call, Operands> prepare(const Group& group, const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, const std::optional<at::Tensor>& sink,
                                  const CallArguments& arguments, std::vector<std::string> more = {});

// The call's number and seed. Nothing is agreed on without peers, and where the caller vouches for them.
Agreed agree(const Call& call, const CallArguments& arguments, CallKind kind, int64_t forward_number);

}  // namespace ringspan::binding
