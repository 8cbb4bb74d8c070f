#include "binding/op/call.h"

#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include <ATen/core/Tensor.h>

#include "ringspan/base/error.h"
#include "ringspan/kernel/isa.h"

#include "binding/base/content_hash.h"
#include "binding/base/tensors.h"
#include "binding/op/map_warning.h"
#include "binding/op/plan_cache.h"

namespace ringspan::binding {
namespace {

void check_tensor(const char* name, const at::Tensor& tensor, Layout layout) {
  RINGSPAN_CHECK(tensor.layout() == at::kStrided, name, " has layout ", concat(tensor.layout()),
                 "; it must be a plain strided tensor");
  const int64_t dims = axes_of(layout).dims;
  RINGSPAN_CHECK(tensor.dim() == dims, name, " has ", tensor.dim(), " dimensions; layout ", ringspan::name_of(layout),
                 " has ", dims);
}

struct Sizes {
  Problem problem;
  int64_t q_rows = 0, kv_rows = 0;
};

// Head counts of tensors whose heads and head dims share an axis.
void split_hidden(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, int64_t num_heads,
                  Problem& problem) {
  const int64_t hidden = query.size(2);
  RINGSPAN_CHECK(hidden % num_heads == 0 && hidden > 0, "num_heads is ", num_heads, " and the query's last size is ",
                 hidden, "; it must be a multiple of num_heads");
  problem.qk_dim = hidden / num_heads;
  RINGSPAN_CHECK(key.size(2) % problem.qk_dim == 0 && key.size(2) > 0, "key's last size is ", key.size(2),
                 " and the query's head dim is ", problem.qk_dim, "; it must be a multiple of it");
  problem.kv_heads = key.size(2) / problem.qk_dim;
  RINGSPAN_CHECK(value.size(2) % problem.kv_heads == 0 && value.size(2) > 0, "value's last size is ", value.size(2),
                 " and there are ", problem.kv_heads, " key/value heads; it must be a multiple of them");
  problem.v_dim = value.size(2) / problem.kv_heads;
}

void check_same(const char* what, int64_t first, const char* second_name, int64_t second) {
  RINGSPAN_CHECK(first == second, what, " is ", first, " in query and ", second, " in ", second_name,
                 "; they must be equal");
}

// Sizes where heads have an axis of their own; the head dim is the last one.
void read_heads(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, int64_t num_heads,
                int64_t head_axis, Problem& problem) {
  check_same("the number of heads", query.size(head_axis), "num_heads", num_heads);
  problem.qk_dim = query.size(-1);
  problem.kv_heads = key.size(head_axis);
  problem.v_dim = value.size(-1);
  check_same("the head dim", problem.qk_dim, "key", key.size(-1));
  RINGSPAN_CHECK(value.size(head_axis) == problem.kv_heads, "the number of heads is ", problem.kv_heads, " in key and ",
                 value.size(head_axis), " in value; they must be equal");
}

Sizes read_sizes_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, Layout layout,
                    const CallArguments& arguments) {
  const int64_t num_heads = arguments.num_heads;
  RINGSPAN_CHECK(num_heads >= 1, "num_heads is ", num_heads, "; it must be at least 1");
  Sizes sizes;
  Problem& problem = sizes.problem;
  problem.layout = layout;
  problem.dtype = core_dtype("query", query);
  for (const auto& [name, tensor] : {std::pair("key", &key), std::pair("value", &value)}) {
    RINGSPAN_CHECK(tensor->device() == query.device(), "query is on ", query.device().str(), " and ", name, " on ",
                   tensor->device().str(), "; put them on one device");
    RINGSPAN_CHECK(tensor->scalar_type() == query.scalar_type(), "query is ", toString(query.scalar_type()), " and ",
                   name, " is ", toString(tensor->scalar_type()), "; query, key and value must have one dtype");
  }
  problem.scale = arguments.scale;
  problem.q_heads = num_heads;
  const Axes axes = axes_of(layout);
  if (axes.head >= 0) {
    read_heads(query, key, value, num_heads, axes.head, problem);
  } else {
    split_hidden(query, key, value, num_heads, problem);
  }
  if (axes.batch >= 0) {
    problem.batch = query.size(axes.batch);
    check_same("the batch", problem.batch, "key", key.size(axes.batch));
    check_same("the batch", problem.batch, "value", value.size(axes.batch));
  }
  sizes.q_rows = query.size(axes.row);
  sizes.kv_rows = key.size(axes.row);
  RINGSPAN_CHECK(value.size(axes.row) == sizes.kv_rows, "key has ", sizes.kv_rows, " rows and value ",
                 value.size(axes.row), "; they must be equal");
  return sizes;
}

// Everything that a plan depends on, the rank and the pattern apart.
PlanCache::Words words_of(const Problem& problem, const Schedule& schedule, Exchange exchange,
                          const Share& batch_share) {
  PlanCache::Words words = {problem.batch,
                            problem.q_heads,
                            problem.kv_heads,
                            problem.qk_dim,
                            problem.v_dim,
                            static_cast<int64_t>(problem.dtype),
                            static_cast<int64_t>(problem.layout),
                            std::bit_cast<int64_t>(problem.scale),
                            static_cast<int64_t>(schedule.kind),
                            schedule.inner,
                            schedule.outer,
                            static_cast<int64_t>(exchange),
                            batch_share.index};
  for (const RowTensor* tensor : {&problem.bias, &problem.mask}) {
    words.insert(words.end(), {tensor->batch, tensor->heads, tensor->element_bytes, tensor->wants_gradient});
  }
  return words;
}

RankPlan build_part(Problem problem, const CallArguments& arguments, const Schedule& schedule, Exchange exchange,
                    int64_t rank) {
  const Decoded decoded = arguments.pattern->build();
  problem.q_len = decoded.q_len;
  problem.kv_len = decoded.kv_len;
  // Where rows go in global order and each entry has its own, what entries share travels once for each.
  const bool has_orders = fixes_order(schedule) && decoded.q_map.num_lists() > 1;
  for (RowTensor* tensor : {&problem.bias, &problem.mask}) {
    if (has_orders && tensor->is_given()) tensor->batch = problem.batch;
  }
  const Share& share = arguments.batch_share;
  const MaskSpec mask =
      share.count == 1 ? decoded.mask : decoded.mask.entries(share.index * problem.batch, problem.batch);
  return build_plan(problem, mask, decoded.q_map, decoded.kv_map, schedule, route_of(exchange, decoded.world))
      .rank(rank);
}

// A tensor that is split by query rows, as schedules that move these know it.
RowTensor row_tensor(const at::Tensor& tensor, RowReading rows, bool wants_gradient) {
  if (rows == RowReading::kShared || rows == RowReading::kNone) return {};
  return {.batch = batch_of_pairs(tensor),
          .heads = heads_of_pairs(tensor),
          .element_bytes = static_cast<int64_t>(tensor.element_size()),
          .wants_gradient = wants_gradient};
}

// Finds or builds the plan of a call whose readings are known.
void find_plan(const CallArguments& arguments, const Schedule& schedule, Problem problem, Call& call) {
  const PairArguments& pairs = arguments.pairs;
  problem.bias = problem.mask = {};
  if (pairs.bias) problem.bias = row_tensor(*pairs.bias, call.bias_rows, pairs.wants_bias_gradient);
  if (pairs.mask) problem.mask = row_tensor(*pairs.mask, call.mask_rows, false);
  PlanCache::Words words = words_of(problem, schedule, call.exchange, arguments.batch_share);
  const size_t begin = words.size();
  const uint64_t own_hash = hash_words(words);
  arguments.pattern->append_content(words);
  call.pattern_hash = hash_words(std::span(words).subspan(begin));
  call.plan = PlanCache::process().find_or_build(
      std::move(words), mix(own_hash ^ call.pattern_hash), call.group.rank,
      [&] { return build_part(problem, arguments, schedule, call.exchange, call.group.rank); });
}

void check_rows(const char* name, int64_t rows, int64_t expected, int64_t rank) {
  RINGSPAN_CHECK(rows == expected, name, " has ", rows, " rows on rank ", rank, " and its shard map gives rank ", rank,
                 " ", expected, "; pass the tensor that the same map sharded");
}

}  // namespace

Schedule parse_schedule_name(const std::string& name, Exchange exchange) {
  if (name == "auto") return exchange == Exchange::kAllGather ? Schedule::kGather : Schedule::kRing;
  return parse_schedule(name);
}

Call prepare_call(Group group, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const CallArguments& arguments) {
  Call call;
  call.layout = parse_layout(arguments.layout);
  check_tensor("query", query, call.layout);
  check_tensor("key", key, call.layout);
  check_tensor("value", value, call.layout);
  Sizes sizes = read_sizes_of(query, key, value, call.layout, arguments);
  arguments.check_tensors(sizes.problem.dtype);
  call.exchange = parse_exchange(arguments.exchange);
  const Schedule schedule = parse_schedule_name(arguments.schedule, call.exchange);
  check_schedule(schedule, group.size);
  check_exchange(call.exchange, schedule);
  if (moves_queries(schedule)) {
    const PairArguments& pairs = arguments.pairs;
    if (pairs.bias) call.bias_rows = reading_of(*pairs.bias, sizes.q_rows);
    if (pairs.mask && !pairs.mask_by_grid) call.mask_rows = reading_of(*pairs.mask, sizes.q_rows);
  }
  const SpecSizes spec = arguments.pattern->sizes();
  RINGSPAN_CHECK(spec.world == group.size, "the shard map is for ", spec.world, " ranks and the group has ", group.size,
                 "; build it for this group");
  const Share& share = arguments.batch_share;
  RINGSPAN_CHECK(spec.batch == sizes.problem.batch * share.count, "the batch is ", sizes.problem.batch,
                 " in query and ", spec.batch, " in the call's description, of which this is one of ", share.count,
                 " parts; they must agree");
  current_isa();  // a wrong RINGSPAN_ISA is found here
  call.group = std::move(group);
  find_plan(arguments, schedule, sizes.problem, call);
  check_rows("query", sizes.q_rows, call.plan->q_rows[call.group.rank], call.group.rank);
  check_rows("key", sizes.kv_rows, call.plan->kv_rows[call.group.rank], call.group.rank);
  if (arguments.map_is_default && call.group.size > 1) {
    warn_of_map(call.pattern_hash, [&] { return arguments.pattern->build(); });
  }
  return call;
}

Call settle_rows(const Call& call, const CallArguments& arguments, RowReading bias_rows, RowReading mask_rows) {
  Call settled = call;
  settled.bias_rows = bias_rows;
  settled.mask_rows = mask_rows;
  Problem problem = call.problem();
  problem.q_len = problem.kv_len = 0;  // the pattern's
  find_plan(arguments, call.plan->schedule, problem, settled);
  return settled;
}

at::Tensor prepare_sink(const Call& call, const std::optional<at::Tensor>& sink, at::Device device) {
  if (!sink) return {};
  const Problem& p = call.problem();
  const at::ScalarType accumulator = torch_dtype(accumulator_of(p.dtype));
  RINGSPAN_CHECK(sink->dim() == 1 && sink->size(0) == p.q_heads, "sink has shape ", sink->sizes(), " and the query ",
                 p.q_heads, " heads; give one value per query head, [", p.q_heads, "]");
  RINGSPAN_CHECK(sink->device() == device, "sink lies on ", sink->device().str(), " and the query on ", device.str(),
                 "; put them on one device");
  const at::Tensor dense = sink->to(accumulator).contiguous(), read = dense.cpu();
  for (int64_t head = 0; head < p.q_heads; ++head) {
    const double value =
        load_as_double(static_cast<const std::byte*>(read.const_data_ptr()), accumulator_of(p.dtype), head);
    RINGSPAN_CHECK(!std::isnan(value) && value < std::numeric_limits<double>::infinity(), "sink holds ", value,
                   " for head ", head, "; it must be finite, or -inf for a head without a sink");
  }
  return dense;
}

void sign(const Call& call, const CallArguments& arguments, Signature& signature) {
  const Problem& p = call.problem();
  const auto rows = [&](const std::vector<int64_t>& all) { return concat(all[call.group.rank], " local rows"); };
  signature.add("batch", p.batch);
  signature.add("q_heads", p.q_heads);
  signature.add("kv_heads", p.kv_heads);
  signature.add("qk_dim", p.qk_dim);
  signature.add("v_dim", p.v_dim);
  signature.add("dtype", std::string(ringspan::name_of(p.dtype)));
  signature.add("layout", std::string(ringspan::name_of(p.layout)));
  signature.add("q_len", p.q_len, signature.has_text() ? rows(call.plan->q_rows) : "");
  signature.add("kv_len", p.kv_len, signature.has_text() ? rows(call.plan->kv_rows) : "");
  signature.add_hash(call.pattern_hash);
  if (signature.has_text()) {
    for (Field& field : arguments.pattern->describe()) signature.add_text(std::move(field));
  }
  const auto part = [](const Share& share) { return concat(share.index, " of ", share.count); };
  signature.add("part of the batch", part(arguments.batch_share));
  signature.add("part of the heads", part(arguments.head_share));
  signature.add("schedule", ringspan::name_of(call.plan->schedule));
  signature.add("exchange", std::string(name_of(call.exchange)));
  if (fixes_order(call.plan->schedule)) signature.add("instruction set", std::string(name_of(current_isa())));
  arguments.sign_record(signature);
  for (const auto& [name, tensor] :
       {std::pair("sizes of bias", &arguments.pairs.bias), std::pair("sizes of attn_mask", &arguments.pairs.mask)}) {
    if (!*tensor || arguments.pairs.mask_by_grid) continue;
    signature.add(name, concat(batch_of_pairs(**tensor), " batch entries, ", heads_of_pairs(**tensor), " heads"));
  }
  signature.add("gradient of bias", arguments.pairs.wants_bias_gradient);
}

}  // namespace ringspan::binding
