#include "binding/call.h"

#include <bit>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>
#include <utility>

#include <ATen/core/Tensor.h>

#include "ringspan/base/error.h"

#include "binding/content_hash.h"
#include "binding/plan_cache.h"
#include "binding/tensors.h"

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

// Everything that a plan depends on, the rank apart.
PlanCache::Words content_of(const Problem& problem, const Description& description, const Schedule& schedule,
                            Exchange exchange, const Share& batch_share) {
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
                            batch_share.index,
                            static_cast<int64_t>(description.spec.size())};
  for (const RowTensor* tensor : {&problem.bias, &problem.mask}) {
    words.insert(words.end(), {tensor->batch, tensor->heads, tensor->element_bytes, tensor->wants_gradient});
  }
  size_t total = words.size() + description.spec.size();
  for (const Table& table : description.tables) total += 1 + table.size.size() + table.num_elements();
  words.reserve(total);
  words.insert(words.end(), description.spec.begin(), description.spec.end());
  for (const Table& table : description.tables) {
    words.push_back(static_cast<int64_t>(table.size.size()));
    words.insert(words.end(), table.size.begin(), table.size.end());
    words.insert(words.end(), table.data, table.data + table.num_elements());
  }
  return words;
}

RankPlan build_part(Problem problem, const Description& description, const Schedule& schedule, Exchange exchange,
                    int64_t rank, const Share& batch_share) {
  const Decoded decoded = decode(description);
  problem.q_len = decoded.q_len;
  problem.kv_len = decoded.kv_len;
  // Where rows go in global order and each entry has its own, what entries share travels once for each.
  const bool has_orders = fixes_order(schedule) && decoded.q_map.num_lists() > 1;
  for (RowTensor* tensor : {&problem.bias, &problem.mask}) {
    if (has_orders && tensor->is_given()) tensor->batch = problem.batch;
  }
  const MaskSpec mask =
      batch_share.count == 1 ? decoded.mask : decoded.mask.entries(batch_share.index * problem.batch, problem.batch);
  return build_plan(problem, mask, decoded.q_map, decoded.kv_map, schedule, route_of(exchange, decoded.world))
      .rank(rank);
}

// A tensor that is split by query rows, as schedules that move these know it. One row for all queries is no such thing;
// where this rank has a single row, it is taken for that one.
RowTensor row_tensor(const at::Tensor& tensor, int64_t q_rows, bool wants_gradient) {
  const int64_t dims = tensor.dim();
  const auto size = [&](int64_t axis) { return dims >= axis ? tensor.size(-axis) : 1; };
  if (size(2) != q_rows) return {};
  return {.batch = size(4),
          .heads = size(3),
          .element_bytes = static_cast<int64_t>(tensor.element_size()),
          .wants_gradient = wants_gradient};
}

void describe_row_tensors(const PairArguments& pairs, int64_t q_rows, Problem& problem) {
  if (pairs.bias) problem.bias = row_tensor(*pairs.bias, q_rows, pairs.wants_bias_gradient);
  if (pairs.mask && !pairs.mask_by_grid) problem.mask = row_tensor(*pairs.mask, q_rows, false);
}

// Which messages an exchange can carry.
void check_exchange(Exchange exchange, const Schedule& schedule) {
  if (exchange != Exchange::kAllGather || schedule.kind == ScheduleKind::kRing) return;
  throw Unsupported(concat("exchange all_gather is offered for schedule ring, not for ", ringspan::name_of(schedule),
                           "; use all_to_all or p2p, or schedule gather with all_to_all"));
}

void check_rows(const char* name, int64_t rows, int64_t expected, int64_t rank) {
  RINGSPAN_CHECK(rows == expected, name, " has ", rows, " rows on rank ", rank, " and its shard map gives rank ", rank,
                 " ", expected, "; pass the tensor that the same map sharded");
}

}  // namespace

Schedule parse_schedule_name(const std::string& name) {
  if (name == "auto") return Schedule::kRing;
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
  call.exchange = parse_exchange(arguments.exchange);
  const Schedule schedule = parse_schedule_name(arguments.schedule);
  check_schedule(schedule, group.size);
  check_exchange(call.exchange, schedule);
  if (moves_queries(schedule)) describe_row_tensors(arguments.pairs, sizes.q_rows, sizes.problem);

  std::vector<at::Tensor> kept;
  const Description description = description_of(arguments.spec, arguments.tables, kept);
  const SpecSizes spec = read_sizes(description.spec);
  RINGSPAN_CHECK(spec.world == group.size, "the shard map is for ", spec.world, " ranks and the group has ", group.size,
                 "; build it for this group");
  const Share& share = arguments.batch_share;
  RINGSPAN_CHECK(spec.batch == sizes.problem.batch * share.count, "the batch is ", sizes.problem.batch,
                 " in query and ", spec.batch, " in the call's description, of which this is one of ", share.count,
                 " parts; they must agree");

  PlanCache::Words words = content_of(sizes.problem, description, schedule, call.exchange, share);
  call.hash = hash_words(words);
  call.plan = PlanCache::process().find_or_build(std::move(words), call.hash, group.rank, [&] {
    return build_part(sizes.problem, description, schedule, call.exchange, group.rank, share);
  });
  check_rows("query", sizes.q_rows, call.plan->q_rows[group.rank], group.rank);
  check_rows("key", sizes.kv_rows, call.plan->kv_rows[group.rank], group.rank);
  call.group = std::move(group);
  return call;
}

at::Tensor prepare_sink(const Call& call, const std::optional<at::Tensor>& sink, at::Device device) {
  if (!sink) return {};
  const Problem& p = call.problem();
  const at::ScalarType accumulator = torch_dtype(accumulator_of(p.dtype));
  RINGSPAN_CHECK(sink->dim() == 1 && sink->size(0) == p.q_heads, "sink has shape ", sink->sizes(), " and the query ",
                 p.q_heads, " heads; give one value per query head, [", p.q_heads, "]");
  RINGSPAN_CHECK(sink->scalar_type() == at::kFloat || sink->scalar_type() == accumulator, "sink is ",
                 toString(sink->scalar_type()), "; it must be Float", accumulator == at::kDouble ? " or Double" : "");
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

Fields describe_call(const Call& call, const CallArguments& arguments) {
  std::vector<at::Tensor> kept;
  const DescriptionText text = describe(description_of(arguments.spec, arguments.tables, kept));
  const Problem& p = call.problem();
  const auto rows = [&](const std::vector<int64_t>& all) { return concat(all[call.group.rank], " local rows"); };
  const auto value = [](const auto& what) {
    std::ostringstream stream;
    stream << std::setprecision(17) << what;
    return stream.str();
  };
  Fields fields = {{"batch", value(p.batch)},
                   {"q_heads", value(p.q_heads)},
                   {"kv_heads", value(p.kv_heads)},
                   {"qk_dim", value(p.qk_dim)},
                   {"v_dim", value(p.v_dim)},
                   {"dtype", ringspan::name_of(p.dtype)},
                   {"layout", ringspan::name_of(p.layout)},
                   {"scale", value(p.scale)},
                   {"q_len", value(p.q_len), rows(call.plan->q_rows)},
                   {"kv_len", value(p.kv_len), rows(call.plan->kv_rows)},
                   {"shard_map", text.q_map},
                   {"kv_shard_map", text.kv_map},
                   {"mask", text.mask},
                   {"sink", arguments.has_sink ? "given" : "none"},
                   {"schedule", ringspan::name_of(call.plan->schedule)},
                   {"exchange", name_of(call.exchange)}};
  for (const auto& [name, tensor] : {std::pair("bias by rows", &p.bias), std::pair("mask by rows", &p.mask)}) {
    if (tensor->is_given()) fields.push_back({name, concat(tensor->batch, " x ", tensor->heads, " heads")});
  }
  const Fields pairs = describe(arguments.pairs);
  fields.insert(fields.end(), pairs.begin(), pairs.end());
  return fields;
}

Description description_of(at::IntArrayRef spec, at::TensorList tables, std::vector<at::Tensor>& kept) {
  Description description{.spec = {spec.data(), spec.size()}, .tables = {}};
  for (size_t i = 0; i < tables.size(); ++i) {
    const at::Tensor& table = tables[i];
    RINGSPAN_CHECK(table.scalar_type() == at::kLong && table.device().is_cpu(), "table ", i, " is ",
                   toString(table.scalar_type()), " on ", table.device().str(), "; tables are int64 on the CPU");
    kept.push_back(table.contiguous());
    description.tables.push_back({table.sizes().vec(), kept.back().const_data_ptr<int64_t>()});
  }
  return description;
}

}  // namespace ringspan::binding
