// Call: one call of the inner ops after its checks: sizes, plan, group. Everything that fails here fails before the
// first byte is sent.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ringspan/plan/exchange.h"
#include "ringspan/plan/plan.h"

#include "binding/agreement.h"
#include "binding/decode.h"
#include "binding/group.h"
#include "binding/pair_arguments.h"

namespace ringspan::binding {

// "auto" is ring.
Schedule parse_schedule_name(const std::string& name);

// What the inner ops are called with, apart from tensors with gradients.
struct CallArguments {
  at::IntArrayRef spec;
  at::TensorList tables;
  double scale = 1;
  std::string layout;
  int64_t num_heads = 1;
  std::string group_name, schedule, exchange;
  bool assume_agreed = false;
  bool needs_grad = false;  // some rank-local input will ask for a backward
  bool has_sink = false;
  PairArguments pairs{};
  // The description and the places in `pairs` are those of an undivided call; this process's tensors are these equal
  // parts of its batch entries and of its heads.
  Share batch_share{}, head_share{};
};

struct Call {
  Group group;
  Layout layout = Layout::kBNSD;
  Exchange exchange = Exchange::kAllToAll;
  std::shared_ptr<const RankPlan> plan;
  uint64_t hash = 0;         // of everything that must be the same on all ranks
  bool by_step_ops = false;  // the arithmetic is that of step_backend.h

  const Problem& problem() const { return plan->problem; }
};

// `group` is found beforehand, so that a failure in here can be told to its members.
// Error naming the argument and both values; Unsupported for what is not offered. Cost of a call that was seen before:
// a copy, a hash and a comparison of its tables.
Call prepare_call(Group group, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const CallArguments& arguments);

// `sink` [q heads], in fp32 or the accumulator type of the call, as a dense tensor of the accumulator type; undefined
// where none was given. Error for another size, dtype or device, and where it holds NaN or +inf, which have no weight.
at::Tensor prepare_sink(const Call& call, const std::optional<at::Tensor>& sink, at::Device device);

// For messages of the agreement.
Fields describe_call(const Call& call, const CallArguments& arguments);

// Borrowed view of the tables; `kept` owns those that had to be copied to be dense.
Description description_of(at::IntArrayRef spec, at::TensorList tables, std::vector<at::Tensor>& kept);

}  // namespace ringspan::binding
