#include "binding/agreed_call.h"

#include "binding/content_hash.h"
#include "binding/step_backend.h"

namespace ringspan::binding {
namespace {

// The arguments that change the arithmetic, by the names that a caller knows.
std::vector<std::string> names_of_given(const CallArguments& arguments, std::vector<std::string> names) {
  const PairArguments& pairs = arguments.pairs;
  for (const auto& [name, is_given] :
       {std::pair("sink", arguments.has_sink), std::pair("attn_mask", pairs.mask.has_value()),
        std::pair("bias", pairs.bias.has_value()), std::pair("alibi", pairs.slopes.has_value()),
        std::pair("softcap", pairs.softcap != 0), std::pair("dropout_p", pairs.dropout_p != 0)}) {
    if (is_given) names.emplace_back(name);
  }
  return names;
}

}  // namespace

std::pair<Call, Operands> prepare(const Group& group, const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, const std::optional<at::Tensor>& sink,
                                  const CallArguments& arguments, std::vector<std::string> more) {
  Call call = prepare_call(group, query, key, value, arguments);
  call.by_step_ops = choose_step_ops(call, query, names_of_given(arguments, std::move(more)));
  PairArguments pairs = arguments.pairs;
  pairs.batch_offset += arguments.batch_share.index * call.problem().batch;
  pairs.head_offset += arguments.head_share.index * call.problem().q_heads;
  Operands operands{query, key, value, prepare_sink(call, sink, query.device()),
                    PairOperands(pairs, call.problem(), call.plan->q_rows[call.group.rank])};
  return {std::move(call), std::move(operands)};
}

Agreed agree(const Call& call, const CallArguments& arguments, CallKind kind, int64_t forward_number) {
  const PairArguments& pairs = arguments.pairs;
  if (!has_peers(call.group)) return {0, pairs.seed};
  if (arguments.assume_agreed) {
    RINGSPAN_CHECK(!pairs.seed_is_drawn,
                   "assume_agreed is set and dropout has no seed; each rank would draw its own, "
                   "give one seed to all");
    return {0, pairs.seed};
  }
  const Proposal proposal{.kind = kind,
                          .forward_number = forward_number,
                          .needs_grad = arguments.needs_grad,
                          .hash = mix(call.hash ^ (arguments.has_sink ? 1 : 0) ^ hash_of(pairs)),
                          .seed = pairs.seed,
                          .seed_is_drawn = pairs.seed_is_drawn,
                          .describe = [&] { return describe_call(call, arguments); }};
  return Agreement::of(call.group)->agree(call.group, proposal);
}

}  // namespace ringspan::binding
