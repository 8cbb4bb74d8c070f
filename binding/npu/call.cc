#include "binding/npu/call.h"

#include <ATen/ATen.h>

#include "binding/base/tensor_rules.h"
#include "binding/base/tensors.h"
#include "binding/npu/pattern.h"
#include "binding/npu/stats.h"
#include "binding/op/agreed_call.h"
#include "binding/op/run.h"

namespace ringspan::binding {
namespace {

using at::Tensor;

int64_t read_number(const char* name, const std::optional<Tensor>& given, double keep_prob) {
  if (!(keep_prob < 1)) return 0;
  RINGSPAN_CHECK(given, name, " is missing; with keep_prob below 1 it is needed");
  RINGSPAN_CHECK(given->numel() == 1 && given->device().is_cpu() &&
                     (given->scalar_type() == at::kLong || given->scalar_type() == at::kInt),
                 name, " is ", toString(given->scalar_type()), " ", given->sizes(), " on ", given->device().str(),
                 "; it must be one int64 or int32 on the CPU");
  return given->to(at::kLong).item<int64_t>();
}

// This process's part of what is given for all batch entries.
ContractArguments part_of(ContractArguments a, const Share& share, int64_t batch) {
  if (!a.prefix || share.count == 1) return a;
  RINGSPAN_CHECK(static_cast<int64_t>(a.prefix->size()) == batch * share.count, "prefix has ", a.prefix->size(),
                 " values and the batch ", batch * share.count, " entries; give one value per entry");
  const auto begin = a.prefix->begin() + share.index * batch;
  a.prefix = std::vector<c10::SymInt>(begin, begin + batch);
  return a;
}

struct Prepared {
  ContractCall contract;
  CallArguments arguments{};
  PreparedCall call{};
};

PairArguments pairs_of(const ContractArguments& a, const ContractCall& contract, const CallArguments& call) {
  PairArguments pairs = contract.pairs;
  pairs.seed = read_number("seed", a.seed, a.keep_prob);
  pairs.offset = read_number("offset", a.offset, a.keep_prob);
  pairs.total_heads = call.head_share.count * contract.sizes.q_heads;
  return pairs;
}

Prepared prepare_contract(const Group& group, const Tensor& query, const Tensor& key, const Tensor& value,
                          const ContractArguments& given, bool wants_pse) {
  const ContractSizes sizes = read_contract_sizes(query, key, value, given.head_num, given.input_layout);
  const Share batch_share = share_of(given.batch_groups);
  const ContractArguments a = part_of(given, batch_share, sizes.batch);
  ContractMap q_map("q_map", a.q_map, sizes.q_rows, group.size), kv_map("kv_map", a.kv_map, sizes.kv_rows, group.size);
  Prepared p{.contract = read_contract(a, sizes, query.scalar_type(), q_map.seq_len(), kv_map.seq_len())};
  RINGSPAN_CHECK(!a.in_group || sizes.layout != Layout::kTND || a.softmax_layout == "TND", "softmax_layout is \"",
                 a.softmax_layout, "\"; in a group documents cross ranks, say \"TND\"");
  p.arguments = {
      .pattern = std::make_shared<ContractPattern>(p.contract, std::move(q_map), std::move(kv_map), group.size),
      .scale = a.scale,
      .layout = name_of(sizes.layout),
      .num_heads = sizes.q_heads,
      .schedule = a.schedule,
      .exchange = a.exchange,
      .sink = a.sink,
      // The pattern is that of this process's batch entries already, which are counted from the whole call's first.
      .head_share = share_of(a.head_groups),
      .sign_record = [&given](Signature& signature) { signature.add_record(given); },
      .check_tensors = [&given](DType dtype) { check_tensors(given, dtype); }};
  p.arguments.pairs = pairs_of(a, p.contract, p.arguments);
  p.arguments.pairs.batch_offset = batch_share.index * sizes.batch;
  p.arguments.pairs.wants_bias_gradient = wants_pse;
  p.call = prepare(group, query, key, value, p.arguments, {"the row maximum"});
  return p;
}

void check_saved(const char* name, const std::optional<Tensor>& tensor, at::IntArrayRef shape, at::ScalarType dtype) {
  RINGSPAN_CHECK(tensor && tensor->defined(), name, " is missing");
  RINGSPAN_CHECK(tensor->sizes() == shape && tensor->scalar_type() == dtype, name, " is ",
                 toString(tensor->scalar_type()), " ", tensor->sizes(), "; it must be ", toString(dtype), " ", shape);
}

void check_saved(const ContractSizes& s, const ContractBackwardCall& call) {
  const std::vector<int64_t> out_shape = shape_in(s.layout, s.batch, s.q_heads, s.q_rows, s.v_dim);
  check_saved("dy", call.dy, out_shape, call.query.scalar_type());
  check_saved("attention_in", call.out, out_shape, call.query.scalar_type());
  check_saved("softmax_max", call.max, contract_stats_shape(s), at::kFloat);
  check_saved("softmax_sum", call.sum, contract_stats_shape(s), at::kFloat);
}

}  // namespace

ContractForwardTuple run_contract(const ContractForwardCall& call) {
  const ContractArguments& a = call.arguments;
  const Group group = find_group(a.group_name, call.query.device().type());
  const Prepared p = tell_peers(group, false, [&] {
    Prepared prepared = prepare_contract(group, call.query, call.key, call.value, a, call.wants_pse);
    prepared.arguments.needs_grad = call.needs_grad;
    // In a group every rank has drawn for itself.
    prepared.arguments.pairs.seed_is_drawn = a.in_group && a.keep_prob < 1;
    make_agreed(prepared.call, prepared.arguments, CallKind::kForward, 0);
    return prepared;
  });
  LiveCall& live = *p.call.live;
  const Output output = live.run([&] { return run_attention(live, p.call.call, p.call.operands); });
  ContractStats stats = to_contract_stats(output.max, output.sum, p.contract, a.softmax_layout);
  // The seed and offset that were used: the ranks agreed on the seed.
  return {output.out,
          std::move(stats.max),
          std::move(stats.sum),
          at::empty({0}, call.query.options()),
          at::full({1}, p.call.operands.seed, at::kLong),
          at::full({1}, p.arguments.pairs.offset, at::kLong),
          {}};
}

ContractBackwardTuple run_contract_backward(const ContractBackwardCall& call) {
  const ContractArguments& a = call.arguments;
  const Group group = find_group(a.group_name, call.query.device().type());
  const bool wants_pse = a.pse && !a.has_slopes();
  const Prepared p = tell_peers(group, false, [&] {
    Prepared prepared = prepare_contract(group, call.query, call.key, call.value, a, wants_pse);
    check_saved(prepared.contract.sizes, call);
    prepared.arguments.needs_grad = true;
    make_agreed(prepared.call, prepared.arguments, CallKind::kBackward, 0);
    return prepared;
  });
  const Tensor lse = lse_of_contract_stats({*call.max, *call.sum}, p.contract, a.softmax_layout);
  LiveCall& live = *p.call.live;
  const InputGradients gradients = live.run([&] {
    return run_attention_backward(live, p.call.call, p.call.operands, {*call.out, lse, call.dy, Tensor()}, wants_pse);
  });
  return {gradients.query, gradients.key, gradients.value,
          wants_pse ? gradients.bias.to(a.pse->scalar_type()) : at::empty({0}, call.query.options()), gradients.sink};
}

}  // namespace ringspan::binding
