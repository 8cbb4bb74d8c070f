#include "binding/contract_call.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "binding/agreed_call.h"
#include "binding/run.h"
#include "binding/tensors.h"

namespace ringspan::binding {
namespace {

using at::Tensor;

constexpr int64_t kSpecVersion = 1, kContiguousMap = 0, kSegmentsMap = 4;

// A map as the spec holds it: its sequence length, and the two tables of kind 4.
struct MapTables {
  int64_t seq_len = 0;
  Tensor segments, local_rows;  // undefined for a contiguous one
};

MapTables read_map(const char* name, const std::optional<Tensor>& map, int64_t own_rows, int64_t world) {
  if (!map) return {own_rows * world, {}, {}};
  RINGSPAN_CHECK(map->scalar_type() == at::kLong && map->device().is_cpu() && map->dim() == 2 && map->size(1) == 6,
                 name, " is ", toString(map->scalar_type()), " ", map->sizes(), " on ", map->device().str(),
                 "; it must be int64 [n, 6] on the CPU");
  const Tensor dense = map->contiguous();
  const int64_t* data = dense.const_data_ptr<int64_t>();
  std::vector<int64_t> segments, rows(static_cast<size_t>(world), 0);
  int64_t seq_len = 0;
  for (int64_t i = 0; i < dense.size(0); ++i) {
    const int64_t *row = data + i * 6, rank = row[1], local = row[2], begin = row[3], length = row[4], stride = row[5];
    RINGSPAN_CHECK(-1 <= rank && rank < world && length >= 0 && local >= 0, name, " row ", i, " is of rank ", rank,
                   ", local row ", local, ", length ", length, "; the group has ", world, " ranks");
    if (rank >= 0) rows[rank] = std::max(rows[rank], local + length);
    seq_len = std::max(seq_len, rank < 0 ? length : length == 0 ? 0 : begin + (length - 1) * stride + 1);
    if (rank >= 0 && length > 0) segments.insert(segments.end(), row, row + 6);
  }
  return {seq_len, at::tensor(segments, at::kLong).view({-1, 6}), at::tensor(rows, at::kLong)};
}

// The spec of docs/decisions/call-description.md.
struct ContractSpec {
  std::vector<int64_t> spec;
  std::vector<Tensor> tables;
};

void add_map(const MapTables& map, ContractSpec& spec) {
  const bool contiguous = !map.segments.defined();
  spec.spec.insert(spec.spec.end(), {contiguous ? kContiguousMap : kSegmentsMap,
                                     contiguous ? 0 : static_cast<int64_t>(spec.tables.size())});
  if (contiguous) return;
  spec.tables.push_back(map.segments);
  spec.tables.push_back(map.local_rows);
}

ContractSpec make_spec(const ContractCall& call, const MapTables& q_map, const MapTables& kv_map, int64_t world) {
  // The mask's own tables come first, so that its words need no change.
  ContractSpec spec{{kSpecVersion, world, call.sizes.batch, call.q_len, call.kv_len}, call.tables};
  add_map(q_map, spec);
  add_map(kv_map, spec);
  spec.spec.insert(spec.spec.end(), call.mask_words.begin(), call.mask_words.end());
  return spec;
}

// This process's part of what is given for all batch entries.
ContractArguments part_of(ContractArguments a, const Share& share, int64_t batch) {
  if (!a.prefix || share.count == 1) return a;
  RINGSPAN_CHECK(static_cast<int64_t>(a.prefix->size()) == batch * share.count, "prefix has ", a.prefix->size(),
                 " values and the batch ", batch * share.count, " entries; give one value per entry");
  const auto begin = a.prefix->begin() + share.index * batch;
  a.prefix = std::vector<int64_t>(begin, begin + batch);
  return a;
}

struct Prepared {
  ContractCall contract;
  Call call{};
  Operands operands{};
  CallArguments arguments{};
  ContractSpec spec{};
};

Prepared prepare_contract(const Group& group, const Tensor& query, const Tensor& key, const Tensor& value,
                          const ContractArguments& given, const ContractGroup& g, int64_t seed, int64_t offset) {
  const ContractSizes sizes = read_contract_sizes(query, key, value, given.head_num, given.input_layout);
  const ContractArguments a = part_of(given, g.batch_share, sizes.batch);
  const MapTables q_map = read_map("q_map", g.q_map, sizes.q_rows, group.size);
  const MapTables kv_map = read_map("kv_map", g.kv_map, sizes.kv_rows, group.size);
  Prepared p{.contract = read_contract(a, sizes, query.scalar_type(), q_map.seq_len, kv_map.seq_len)};
  RINGSPAN_CHECK(!g.is_given || sizes.layout != Layout::kTND || a.softmax_layout == "TND", "softmax_layout is \"",
                 a.softmax_layout, "\"; in a group documents cross ranks, say \"TND\"");
  p.spec = make_spec(p.contract, q_map, kv_map, group.size);
  PairArguments& pairs = p.contract.pairs;
  pairs.offset = offset;
  pairs.batch_offset = g.batch_share.index * sizes.batch;
  pairs.head_offset = g.head_share.index * sizes.q_heads;
  pairs.total_heads = g.head_share.count * sizes.q_heads;
  p.arguments = {p.spec.spec,
                 p.spec.tables,
                 a.scale,
                 name_of(sizes.layout),
                 sizes.q_heads,
                 g.group_name,
                 g.schedule,
                 g.exchange,
                 /*assume_agreed=*/false,
                 /*needs_grad=*/false,
                 a.sink.has_value(),
                 p.contract.pairs};
  p.arguments.pairs.seed = seed;
  auto [call, operands] = prepare(group, query, key, value, a.sink, p.arguments, {"the row maximum"});
  p.call = std::move(call);
  p.operands = std::move(operands);
  p.operands.seed = seed;
  return p;
}

void check_saved(const char* name, const Tensor& tensor, at::IntArrayRef shape, at::ScalarType dtype) {
  RINGSPAN_CHECK(tensor.defined(), name, " is missing");
  RINGSPAN_CHECK(tensor.sizes() == shape && tensor.scalar_type() == dtype, name, " is ", toString(tensor.scalar_type()),
                 " ", tensor.sizes(), "; it must be ", toString(dtype), " ", shape);
}

}  // namespace

ContractForward run_contract(const Tensor& query, const Tensor& key, const Tensor& value, const ContractArguments& a,
                             const ContractGroup& g, int64_t seed, int64_t offset) {
  const Group group = find_group(g.group_name, query.device().type());
  Prepared p =
      check_or_refuse(group, false, [&] { return prepare_contract(group, query, key, value, a, g, seed, offset); });
  // In a group every rank has drawn for itself.
  p.arguments.pairs.seed_is_drawn = g.is_given && a.keep_prob < 1;
  p.operands.seed = agree(p.call, p.arguments, CallKind::kForward, 0).seed;
  const Output output = run_attention(p.call, p.operands);
  ContractStats stats = to_contract_stats(output.max, output.sum, p.contract, a.softmax_layout);
  return {output.out, stats.max, stats.sum, p.operands.seed};
}

ContractGradients run_contract_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                                        const ContractArguments& a, const ContractGroup& g, const ContractSaved& saved,
                                        int64_t seed, int64_t offset) {
  const Group group = find_group(g.group_name, query.device().type());
  const Prepared p = check_or_refuse(group, false, [&] {
    Prepared prepared = prepare_contract(group, query, key, value, a, g, seed, offset);
    const ContractSizes& s = prepared.contract.sizes;
    const std::vector<int64_t> out_shape = shape_in(s.layout, s.batch, s.q_heads, s.q_rows, s.v_dim);
    check_saved("dy", saved.dy, out_shape, query.scalar_type());
    check_saved("attention_in", saved.out, out_shape, query.scalar_type());
    check_saved("softmax_max", saved.max, contract_stats_shape(s), at::kFloat);
    check_saved("softmax_sum", saved.sum, contract_stats_shape(s), at::kFloat);
    return prepared;
  });
  agree(p.call, p.arguments, CallKind::kBackward, 0);
  const Tensor lse = lse_of_contract_stats({saved.max, saved.sum}, p.contract, a.softmax_layout);
  const bool slopes = p.contract.pairs.slopes.has_value(), wants_pse = a.pse && !slopes;
  const InputGradients gradients =
      run_attention_backward(p.call, p.operands, {saved.out, lse, saved.dy, Tensor()}, wants_pse);
  return {gradients.query, gradients.key, gradients.value,
          wants_pse ? gradients.bias.to(a.pse->scalar_type()) : Tensor(), gradients.sink};
}

}  // namespace ringspan::binding
