#include "binding/contract_inner.h"

#include <tuple>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "ringspan/base/error.h"

#include "binding/contract_call.h"
#include "binding/tensors.h"

namespace ringspan::binding {
namespace {

using at::Tensor;
using std::string;
using OptionalTensor = std::optional<Tensor>;
using NameList = std::optional<c10::List<string>>;
using Prefix = at::OptionalSymIntArrayRef;
using ForwardTuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, std::vector<Tensor>>;
using BackwardTuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// The arguments behind query, key and value in the order of the schema, once as parameters and once as a call's values.
#define RINGSPAN_PARAMETERS                                                                                          \
  int64_t head_num, string input_layout, const OptionalTensor &pse, const OptionalTensor &padding_mask,              \
      const OptionalTensor &atten_mask, double scale, double keep_prob, int64_t pre_tokens, int64_t next_tokens,     \
      int64_t inner_precise, Prefix prefix, const OptionalTensor &q_ends, const OptionalTensor &kv_ends,             \
      int64_t sparse_mode, string softmax_layout, const OptionalTensor &sink, int64_t pse_type, int64_t slope_shift, \
      const OptionalTensor &seed, const OptionalTensor &offset, bool in_group, string group_name,                    \
      const OptionalTensor &q_map, const OptionalTensor &kv_map, string schedule, string exchange,                   \
      NameList batch_groups, NameList head_groups
#define RINGSPAN_NAMES                                                                                             \
  head_num, input_layout, pse, padding_mask, atten_mask, scale, keep_prob, pre_tokens, next_tokens, inner_precise, \
      prefix_of(prefix), q_ends, kv_ends, sparse_mode, softmax_layout, sink, pse_type, slope_shift, seed, offset,  \
      in_group, group_name, q_map, kv_map, schedule, exchange, batch_groups, head_groups
#define RINGSPAN_VALUES(a)                                                                                            \
  a.head_num, a.input_layout, a.pse, a.padding_mask, a.atten_mask, a.scale, a.keep_prob, a.pre_tokens, a.next_tokens, \
      a.inner_precise, a.prefix ? Prefix(*a.prefix) : Prefix(), a.q_ends, a.kv_ends, a.sparse_mode, a.softmax_layout, \
      a.sink, a.pse_type, a.slope_shift, a.seed, a.offset, a.in_group, a.group_name, a.q_map, a.kv_map, a.schedule,   \
      a.exchange, a.batch_groups, a.head_groups

std::optional<std::vector<c10::SymInt>> prefix_of(const Prefix& prefix) {
  return prefix ? std::optional(prefix->vec()) : std::nullopt;
}

// With `values` false neither lengths nor the prefix are read: traced ones have no values.
ContractArguments read_arguments(const ContractOpArguments& a, bool values) {
  const auto ends = [values](const char* name, const OptionalTensor& given) {
    using Ends = std::optional<std::vector<int64_t>>;
    if (!given) return Ends();
    return values ? Ends(read_ends(name, *given)) : Ends(std::vector<int64_t>());
  };
  ContractArguments read{.head_num = a.head_num,
                         .input_layout = a.input_layout,
                         .pse = a.pse,
                         .padding_mask = a.padding_mask,
                         .atten_mask = a.atten_mask,
                         .scale = a.scale,
                         .keep_prob = a.keep_prob,
                         .pre_tokens = a.pre_tokens,
                         .next_tokens = a.next_tokens,
                         .inner_precise = a.inner_precise,
                         .prefix = {},
                         .q_ends = ends("actual_seq_qlen", a.q_ends),
                         .kv_ends = ends("actual_seq_kvlen", a.kv_ends),
                         .sparse_mode = a.sparse_mode,
                         .softmax_layout = a.softmax_layout,
                         .sink = a.sink,
                         .pse_type = static_cast<PseType>(a.pse_type),
                         .slope_shift = a.slope_shift};
  RINGSPAN_CHECK(0 <= a.pse_type && a.pse_type <= 3, "pse_type is ", a.pse_type, "; it must be 0, 1, 2 or 3");
  if (!a.prefix || !values) return read;
  read.prefix.emplace();
  for (const c10::SymInt& length : *a.prefix) read.prefix->push_back(length.guard_int(__FILE__, __LINE__));
  return read;
}

ContractGroup group_of(const ContractOpArguments& a) {
  return {a.group_name,           a.q_map, a.kv_map, a.schedule, a.exchange, a.in_group, share_of(a.batch_groups),
          share_of(a.head_groups)};
}

int64_t read_number(const char* name, const OptionalTensor& given, double keep_prob) {
  if (!(keep_prob < 1)) return 0;
  RINGSPAN_CHECK(given, name, " is missing; with keep_prob below 1 it is needed");
  RINGSPAN_CHECK(given->numel() == 1 && given->device().is_cpu() &&
                     (given->scalar_type() == at::kLong || given->scalar_type() == at::kInt),
                 name, " is ", toString(given->scalar_type()), " ", given->sizes(), " on ", given->device().str(),
                 "; it must be one int64 or int32 on the CPU");
  return given->to(at::kLong).item<int64_t>();
}

ForwardTuple forward(const Tensor& query, const Tensor& key, const Tensor& value, RINGSPAN_PARAMETERS) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const ContractOpArguments a{RINGSPAN_NAMES};
  return contract_errors([&] {
    const int64_t used_offset = read_number("offset", offset, keep_prob);
    ContractForward result = run_contract(query, key, value, read_arguments(a, true), group_of(a),
                                          read_number("seed", seed, keep_prob), used_offset);
    return ForwardTuple{std::move(result.out),
                        std::move(result.max),
                        std::move(result.sum),
                        at::empty({0}, query.options()),
                        at::full({1}, result.seed, at::kLong),
                        at::full({1}, used_offset, at::kLong),
                        {}};
  });
}

BackwardTuple backward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy,
                       const OptionalTensor& max, const OptionalTensor& sum, const OptionalTensor& out,
                       bool /*are_parts*/, RINGSPAN_PARAMETERS) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const ContractOpArguments a{RINGSPAN_NAMES};
  return contract_errors([&] {
    ContractGradients g =
        run_contract_backward(query, key, value, read_arguments(a, true), group_of(a),
                              {dy, max.value_or(Tensor()), sum.value_or(Tensor()), out.value_or(Tensor())},
                              read_number("seed", seed, keep_prob), read_number("offset", offset, keep_prob));
    return BackwardTuple{std::move(g.dq), std::move(g.dk), std::move(g.dv),
                         g.dpse.defined() ? std::move(g.dpse) : at::empty({0}, query.options()), std::move(g.dsink)};
  });
}

bool is_symbolic(const Tensor& tensor) { return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides(); }

// The checks that need no values, where all sizes are numbers.
void check_shapes(const Tensor& query, const Tensor& key, const Tensor& value, const ContractOpArguments& a) {
  for (const auto& [name, ends] :
       {std::pair("actual_seq_qlen", &a.q_ends), std::pair("actual_seq_kvlen", &a.kv_ends)}) {
    // One of them brought the call here. Traced calls have no values anywhere.
    RINGSPAN_CHECK(!*ends || query.is_meta() || !(*ends)->is_meta(), name, " lies on meta and query on ",
                   query.device().str(), "; lengths must be on the CPU");
  }
  if (a.in_group || is_symbolic(query) || is_symbolic(key) || is_symbolic(value)) return;
  const ContractSizes sizes = read_contract_sizes(query, key, value, a.head_num, a.input_layout);
  check_contract(read_arguments(a, false), sizes, query.scalar_type(), sizes.q_rows, sizes.kv_rows);
}

ForwardTuple forward_meta(const Tensor& query, const Tensor& key, const Tensor& value, RINGSPAN_PARAMETERS) {
  const ContractOpArguments a{RINGSPAN_NAMES};
  return contract_errors([&] {
    check_shapes(query, key, value, a);
    const Layout layout = parse_contract_layout(input_layout);
    const Axes axes = axes_of(layout);
    auto shape = query.sym_sizes().vec();
    if (axes.head >= 0) {
      shape.back() = value.sym_size(-1);
    } else {
      shape[2] = c10::SymInt(head_num) * (value.sym_size(2) / (key.sym_size(2) / (query.sym_size(2) / head_num)));
    }
    std::vector<c10::SymInt> stats = {axes.batch < 0 ? c10::SymInt(1) : query.sym_size(axes.batch), head_num,
                                      query.sym_size(axes.row), 8};
    if (layout == Layout::kTND) stats = {query.sym_size(0), head_num, 8};
    const auto wide = query.options().dtype(at::kFloat);
    const auto words = query.options().dtype(at::kLong);
    return ForwardTuple{at::empty_symint(shape, query.options()),
                        at::empty_symint(stats, wide),
                        at::empty_symint(stats, wide),
                        at::empty({0}, query.options()),
                        at::empty({1}, words),
                        at::empty({1}, words),
                        {}};
  });
}

BackwardTuple backward_meta(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor&,
                            const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, bool,
                            RINGSPAN_PARAMETERS) {
  const ContractOpArguments a{RINGSPAN_NAMES};
  contract_errors([&] { check_shapes(query, key, value, a); });
  return {empty_dense(query), empty_dense(key), empty_dense(value),
          pse ? empty_dense(*pse) : at::empty({0}, query.options()),
          sink ? empty_dense(*sink) : at::empty({0}, query.options().dtype(at::kFloat))};
}

using ForwardSignature = ForwardTuple(const Tensor&, const Tensor&, const Tensor&, RINGSPAN_PARAMETERS);
using BackwardSignature = BackwardTuple(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, bool,
                                        RINGSPAN_PARAMETERS);

}  // namespace

ContractOpResult call_contract_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                       const ContractOpArguments& a) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ringspan::_contract_forward", "").typed<ForwardSignature>();
  auto [out, max, sum, softmax_out, seed, offset, kept] = op.call(query, key, value, RINGSPAN_VALUES(a));
  return {std::move(out),  std::move(max),    std::move(sum), std::move(softmax_out),
          std::move(seed), std::move(offset), std::move(kept)};
}

ContractOpGradients call_contract_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const ContractOpSaved& saved, const ContractOpArguments& a) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ringspan::_contract_backward", "").typed<BackwardSignature>();
  auto [dq, dk, dv, dpse, dsink] =
      op.call(query, key, value, saved.dy, saved.max, saved.sum, saved.out, saved.are_parts, RINGSPAN_VALUES(a));
  return {std::move(dq), std::move(dk), std::move(dv), std::move(dpse), std::move(dsink)};
}

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  const string common =
      "int head_num, str input_layout, Tensor? pse, Tensor? padding_mask, Tensor? atten_mask, float scale, "
      "float keep_prob, int pre_tokens, int next_tokens, int inner_precise, SymInt[]? prefix, Tensor? q_ends, "
      "Tensor? kv_ends, int sparse_mode, str softmax_layout, Tensor? sink, int pse_type, int slope_shift, "
      "Tensor? seed, Tensor? offset, bool in_group, str group_name, Tensor? q_map, Tensor? kv_map, str schedule, "
      "str exchange, str[]? batch_groups=None, str[]? head_groups=None)";
  const string forward =
      "(Tensor query, Tensor key, Tensor value, " + common +
      " -> (Tensor out, Tensor max, Tensor sum, Tensor softmax_out, Tensor used_seed, Tensor used_offset, "
      "Tensor[] kept)";
  const string backward =
      "(Tensor query, Tensor key, Tensor value, Tensor dy, Tensor? softmax_max, Tensor? softmax_sum, "
      "Tensor? attention_in, bool are_parts, " +
      common + " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dpse, Tensor dsink)";
  m.def(("_contract_forward" + forward).c_str(), tags);
  m.def(("_contract_backward" + backward).c_str(), tags);
  m.def(("_visible_contract_forward" + forward).c_str(), tags);
  m.def(("_visible_contract_backward" + backward).c_str(), tags);
}

TORCH_LIBRARY_IMPL(ringspan, CompositeExplicitAutograd, m) {
  m.impl("_contract_forward", &forward);
  m.impl("_contract_backward", &backward);
}

// As in inner_ops.cc: CommDebugMode counts the collectives through these.
TORCH_LIBRARY_IMPL(ringspan, CompositeImplicitAutograd, m) {
  m.impl("_visible_contract_forward", &forward);
  m.impl("_visible_contract_backward", &backward);
}

TORCH_LIBRARY_IMPL(ringspan, Meta, m) {
  m.impl("_contract_forward", &forward_meta);
  m.impl("_contract_backward", &backward_meta);
}

}  // namespace ringspan::binding
