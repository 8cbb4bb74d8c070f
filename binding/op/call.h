// Call: one call of the inner ops after its checks: sizes, plan, group. Everything that fails here fails before the
// first byte is sent.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ringspan/plan/exchange.h"
#include "ringspan/plan/plan.h"

#include "binding/base/group.h"
#include "binding/group/signature.h"
#include "binding/op/pair_arguments.h"
#include "binding/op/pattern.h"

namespace ringspan::binding {

// "auto" is ring, and gather where the exchange is all_gather.
Schedule parse_schedule_name(const std::string& name, Exchange exchange);

// What a call is, apart from query, key and value: as the ops of either front give it.
struct CallArguments {
  std::shared_ptr<const Pattern> pattern;
  double scale = 1;
  std::string layout;
  int64_t num_heads = 1;
  std::string schedule, exchange;
  bool assume_agreed = false;
  std::string place{};      // where the program made the call; "" unknown
  bool needs_grad = false;  // a backward will follow
  std::optional<at::Tensor> sink{};
  PairArguments pairs{};
  // The pattern and the places in `pairs` are those of an undivided call; this process's tensors are these equal parts
  // of its batch entries and of its heads.
  Share batch_share{}, head_share{};
  bool map_is_default = false;  // the caller gave no shard map
  // Of the op's own record: adds what the ranks must have in common; checks dtypes beside tensors of one.
  std::function<void(Signature&)> sign_record{};
  std::function<void(DType)> check_tensors{};
};

struct Call {
  Group group;
  Layout layout = Layout::kBNSD;
  Exchange exchange = Exchange::kAllToAll;
  std::shared_ptr<const RankPlan> plan;
  uint64_t pattern_hash = 0;
  // Where the plan moves query rows, and so what belongs to them.
  RowReading bias_rows = RowReading::kNone, mask_rows = RowReading::kNone;
  bool by_step_ops = false;  // the arithmetic is that of step_backend.h

  const Problem& problem() const { return plan->problem; }
};

// `group` is found beforehand, so that a failure in here can be told to its members. A tensor of pairs that may be
// shared or by rows counts as by rows.
// Error naming the argument and both values; Unsupported for what is not offered. Cost of a call that was seen before:
// a copy, a hash and a comparison of its pattern.
Call prepare_call(Group group, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const CallArguments& arguments);

// The same call with its tensors of pairs read as the ranks have settled it.
Call settle_rows(const Call& call, const CallArguments& arguments, RowReading bias_rows, RowReading mask_rows);

// `sink` [q heads], in fp32 or the accumulator type of the call, as a dense tensor of the accumulator type; undefined
// where none was given. Error for another size, dtype or device, and where it holds NaN or +inf, which have no weight.
at::Tensor prepare_sink(const Call& call, const std::optional<at::Tensor>& sink, at::Device device);

// What must be the same on every rank of the call.
void sign(const Call& call, const CallArguments& arguments, Signature& signature);

}  // namespace ringspan::binding
