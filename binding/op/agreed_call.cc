#include "binding/op/agreed_call.h"

#include <string_view>

#include "binding/base/content_hash.h"
#include "binding/group/debug.h"
#include "binding/op/step_backend.h"

namespace ringspan::binding {
namespace {

// The arguments that change the arithmetic, by the names that a caller knows.
std::vector<std::string> names_of_given(const CallArguments& arguments, std::vector<std::string> names) {
  const PairArguments& pairs = arguments.pairs;
  for (const auto& [name, is_given] :
       {std::pair("sink", arguments.sink.has_value()), std::pair("attn_mask", pairs.mask.has_value()),
        std::pair("bias", pairs.bias.has_value()), std::pair("alibi", pairs.slopes.has_value()),
        std::pair("dropout_p", pairs.inputs.dropout.p != 0)}) {
    if (is_given) names.emplace_back(name);
  }
  for (const PairNumberInfo& info : kPairNumbers) {
    if (pairs.inputs.numbers.*info.value != 0) names.emplace_back(info.name);
  }
  return names;
}

// Where calls are debugged, of a mask or bias with one row for all queries, which must be the same on every rank; else
// 0. A rank with a single row cannot tell and has no say.
uint64_t hash_of_shared(const std::optional<at::Tensor>& tensor, int64_t q_rows) {
  if (!is_debugged() || !tensor || reading_of(*tensor, q_rows) != RowReading::kShared) return 0;
  const at::Tensor bytes = tensor->detach().cpu().contiguous();
  return hash_text({static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()});
}

Fields describe(const Call& call, const CallArguments& arguments) {
  Signature signature(Signature::Form::kText);
  sign(call, arguments, signature);
  return signature.take_fields();
}

}  // namespace

PreparedCall prepare(const Group& group, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const CallArguments& arguments, std::vector<std::string> more) {
  Call call = prepare_call(group, query, key, value, arguments);
  call.by_step_ops = choose_step_ops(call, query, names_of_given(arguments, std::move(more)));
  PairArguments pairs = arguments.pairs;
  pairs.batch_offset += arguments.batch_share.index * call.problem().batch;
  pairs.head_offset += arguments.head_share.index * call.problem().q_heads;
  Operands operands{query,
                    key,
                    value,
                    prepare_sink(call, arguments.sink, query.device()),
                    PairOperands(pairs, call.problem(), call.plan->q_rows[call.group.rank]),
                    pairs.seed};
  return {std::move(call), std::move(operands)};
}

void make_agreed(PreparedCall& prepared, const CallArguments& arguments, CallKind kind, int64_t forward_number) {
  Call& call = prepared.call;
  const PairArguments& pairs = arguments.pairs;
  if (!has_peers(call.group)) {
    prepared.live = std::make_unique<LiveCall>(call.group);
    return;
  }
  if (arguments.assume_agreed) {
    RINGSPAN_CHECK(!pairs.seed_is_drawn,
                   "assume_agreed is set and dropout has no seed; each rank would draw its own, "
                   "give one seed to all");
    prepared.live =
        Agreement::of(call.group)
            ->begin_unagreed(call.group, {.kind = kind, .forward_number = forward_number, .place = arguments.place});
    return;
  }
  Signature signature(Signature::Form::kHash);
  sign(call, arguments, signature);
  const int64_t q_rows = call.plan->q_rows[call.group.rank];
  const Proposal proposal{.kind = kind,
                          .forward_number = forward_number,
                          .needs_grad = arguments.needs_grad,
                          .hash = signature.hash(),
                          .place = arguments.place,
                          .bias_content = hash_of_shared(pairs.bias, q_rows),
                          .mask_content = pairs.mask_by_grid ? 0 : hash_of_shared(pairs.mask, q_rows),
                          .bias_rows = call.bias_rows,
                          .mask_rows = call.mask_rows,
                          .seed = pairs.seed,
                          .seed_is_drawn = pairs.seed_is_drawn,
                          .describe = [&] { return describe(call, arguments); }};
  Agreed agreed = Agreement::of(call.group)->agree(call.group, proposal);
  prepared.live = std::move(agreed.call);
  prepared.operands.seed = agreed.seed;
  // Only a rank with a single row could not tell.
  const bool is_open = call.bias_rows == RowReading::kEither || call.mask_rows == RowReading::kEither;
  if (is_open) call = settle_rows(call, arguments, agreed.bias_rows, agreed.mask_rows);
}

}  // namespace ringspan::binding
