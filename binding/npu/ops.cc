// The public ops of the contract: fusion_attention (v1), _v2, _v3 and their gradients, _v3 also in a group (.cp). Each
// is a thin reader of its own argument names over the two inner ops; autograd and the draw of the seed happen here.
//
// One boxed function serves all versions: it finds the arguments by the names that the schema gives them, so that a
// version is its schema and nothing else.
#include <algorithm>
#include <limits>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ringspan/base/philox.h"

#include "binding/base/saved_record.h"
#include "binding/base/tensors.h"
#include "binding/npu/call.h"
#include "binding/npu/inner.h"
#include "binding/op/agreed_call.h"

namespace ringspan::binding {
namespace {

using at::Tensor;
using c10::IValue;
using std::string;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

// The arguments of a boxed call by name; absent names read as None.
class Named {
 public:
  Named(const c10::OperatorHandle& op, Stack& stack) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      values_.emplace(arguments[i].name(), stack[stack.size() - arguments.size() + i]);
    }
    torch::jit::drop(stack, arguments.size());
  }

  bool has(const string& name) const { return values_.count(name) != 0; }
  const IValue& at(const string& name) const {
    static const IValue none;
    const auto found = values_.find(name);
    return found == values_.end() ? none : found->second;
  }
  // The first of two names that the schema has.
  const IValue& either(const string& name, const string& other) const { return has(name) ? at(name) : at(other); }
  std::optional<Tensor> tensor(const string& name) const { return at(name).toOptional<Tensor>(); }

 private:
  std::unordered_map<string, IValue> values_;
};

std::optional<std::vector<c10::SymInt>> ints_of(const IValue& value) {
  if (value.isNone()) return std::nullopt;
  return value.toSymIntVector();
}

// Lengths: a tensor in v3, a list before.
std::optional<Tensor> ends_of(const IValue& value) {
  if (value.isNone() || value.isTensor()) return value.toOptional<Tensor>();
  return at::tensor(value.toIntVector(), at::kLong);
}

void refuse_given(const Named& named, const string& name, const string& reason) {
  TORCH_CHECK(named.at(name).isNone(), name, " is given; ", reason);
}

// One integer, or 0: q_start_idx and kv_start_idx.
int64_t start_of(const Named& named, const string& name) {
  const auto starts = ints_of(named.at(name));
  if (!starts || starts->empty()) return 0;
  TORCH_CHECK(starts->size() == 1, name, " has ", starts->size(), " values; it must have one");
  return number_of((*starts)[0]);
}

// No sequence is longer than the bound, so what lies beyond says no more, and sums of it do not overflow.
int64_t tokens_of(const IValue& value) {
  constexpr int64_t kMost = int64_t{1} << 60;
  return std::clamp(value.toInt(), -kMost, kMost);
}

ContractArguments read(const Named& named) {
  refuse_given(named, "query_rope", "it is not offered, join it to query along the head dim");
  refuse_given(named, "key_rope", "it is not offered, join it to key along the head dim");
  refuse_given(named, "dropout_mask", "it is not offered, dropout is drawn from seed and offset");
  ContractArguments a;
  a.head_num = named.at("head_num").toInt();
  a.input_layout = named.at("input_layout").toStringRef();
  a.pse = named.tensor("pse");
  a.padding_mask = named.tensor("padding_mask");
  a.atten_mask = named.tensor("atten_mask");
  a.scale = named.either("scale", "scale_value").toDouble();
  a.keep_prob = named.at("keep_prob").toDouble();
  a.pre_tockens = tokens_of(named.either("pre_tockens", "pre_tokens"));
  a.next_tockens = tokens_of(named.either("next_tockens", "next_tokens"));
  a.inner_precise = named.at("inner_precise").toInt();
  a.prefix = ints_of(named.at("prefix"));
  a.q_ends = ends_of(named.at("actual_seq_qlen"));
  a.kv_ends = ends_of(named.at("actual_seq_kvlen"));
  a.sparse_mode = named.at("sparse_mode").toInt();
  a.softmax_layout = named.at("softmax_layout").toStringRef();
  a.sink = named.tensor("sink");
  if (named.has("pse_type")) a.pse_type = named.at("pse_type").toInt();
  a.slope_shift = start_of(named, "kv_start_idx") - start_of(named, "q_start_idx");
  a.in_group = named.has("group_name");
  if (!a.in_group) return a;
  a.group_name = named.at("group_name").toStringRef();
  a.q_map = named.tensor("q_map");
  a.kv_map = named.tensor("kv_map");
  a.schedule = named.at("schedule").toStringRef();
  a.exchange = named.at("exchange").toStringRef();
  return a;
}

Tensor one_number(int64_t value) { return at::full({1}, value, at::kLong); }

// v1 and v2 take numbers (0 and 0: none given), v3 draws by itself. Above the inner op and through the dispatcher, so
// that a traced graph draws at each run. The overloads `.seeded` are handed both numbers. In a group the inner op takes
// the draw of rank 0.
void fill_seed(const Named& named, ContractArguments& a) {
  if (named.has("dropout_seed")) {
    a.seed = named.tensor("dropout_seed");
    a.offset = named.tensor("dropout_offset");
    return;
  }
  const bool given = named.has("seed") && (named.at("seed").toInt() != 0 || named.at("offset").toInt() != 0);
  if (!(a.keep_prob < 1) || given) {
    a.seed = one_number(given ? named.at("seed").toInt() : 0);
    a.offset = one_number(given ? named.at("offset").toInt() : 0);
    return;
  }
  a.seed = at::randint(std::numeric_limits<int64_t>::max(), {1}, at::kLong);
  a.offset = one_number(0);
}

// ------------------------------------------------------------------------------------------------------- autograd

// The order of the saved tensors; those of the arguments follow.
enum Saved : size_t { kQuery, kKey, kValue, kOut, kMax, kSum, kNumSaved };

struct ContractFunction : torch::autograd::Function<ContractFunction> {
  static variable_list forward(AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value,
                               const std::optional<Tensor>& /*pse*/, const std::optional<Tensor>& /*sink*/,
                               ContractForwardCall call) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const ContractResult result = call_contract_forward(call);
    ContractArguments& a = call.arguments;
    a.seed = result.seed;
    variable_list saved = {query, key, value, result.out, result.max, result.sum};
    if (!result.kept.empty()) {
      std::copy_n(result.kept.begin(), 3, saved.begin() + kOut);
      if (result.kept[3].numel() > 0) a.q_map = result.kept[3];
      if (result.kept[4].numel() > 0) a.kv_map = result.kept[4];
    }
    context->saved_data["are_parts"] = !result.kept.empty();
    save_record(a, *context, saved);
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    return {result.out, result.max, result.sum, result.softmax_out, result.seed, result.offset};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "ringspan::fusion_attention has no second derivative; call backward() without create_graph=True");
    const variable_list saved = context->get_saved_variables();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    variable_list result(6);
    if (!gradients[0].defined()) return result;
    const ContractBackwardCall call{.query = saved[kQuery],
                                    .key = saved[kKey],
                                    .value = saved[kValue],
                                    .dy = gradients[0],
                                    .max = saved[kMax],
                                    .sum = saved[kSum],
                                    .out = saved[kOut],
                                    .are_parts = context->saved_data.at("are_parts").toBool(),
                                    .arguments = restore_record<ContractArguments>(*context, saved, kNumSaved)};
    const ContractArguments& a = call.arguments;
    ContractOpGradients g = call_contract_backward(call);
    // Asked for by the place among the tensors that were given.
    const size_t sink_place = a.pse ? 4 : 3;
    if (context->needs_input_grad(0)) result[0] = std::move(g.dq);
    if (context->needs_input_grad(1)) result[1] = std::move(g.dk);
    if (context->needs_input_grad(2)) result[2] = std::move(g.dv);
    if (a.pse && !a.has_slopes() && context->needs_input_grad(3)) result[3] = std::move(g.dpse);
    if (a.sink && context->needs_input_grad(sink_place)) result[4] = std::move(g.dsink);
    return result;
  }
};

// ------------------------------------------------------------------------------------------------------ boxed ops

// A call of an overload .cp has peers that wait, also for one whose arguments cannot even be read. Traced calls have
// none.
template <class Action>
auto tell_peers_of(const Named& named, Action&& action) {
  const bool is_traced = named.at("query").toTensor().key_set().has(c10::DispatchKey::Python);
  if (!named.has("group_name") || is_traced) return action();
  return contract_errors(
      [&] { return tell_peers(find_group(named.at("group_name").toStringRef()), false, [&] { return action(); }); });
}

ContractForwardCall read_forward(const Named& named) {
  ContractForwardCall call{.query = *named.tensor("query"),
                           .key = *named.tensor("key"),
                           .value = *named.tensor("value"),
                           .arguments = read(named)};
  const ContractArguments& a = call.arguments;
  call.wants_pse = wants_gradient(a.pse);
  TORCH_CHECK(!a.has_slopes() || !call.wants_pse,
              "pse requires a gradient; slopes (pse_type 2, 3) have none, detach them");
  call.needs_grad = wants_gradient(call.query) || wants_gradient(call.key) || wants_gradient(call.value) ||
                    call.wants_pse || wants_gradient(a.sink);
  fill_seed(named, call.arguments);
  return call;
}

// Statistics have no gradient, as the contract says. Not marked so in the function: compiled autograd fails on that.
Tensor without_gradient(const Tensor& tensor) { return tensor.requires_grad() ? tensor.detach() : tensor; }

void forward_op(const c10::OperatorHandle& op, Stack* stack) {
  const Named named(op, *stack);
  tell_peers_of(named, [&] {
    ContractForwardCall call = read_forward(named);
    const std::optional<Tensor> offset = call.arguments.offset;
    const Tensor query = call.query, key = call.key, value = call.value;
    const std::optional<Tensor> pse = call.arguments.pse, sink = call.arguments.sink;
    const variable_list results = ContractFunction::apply(query, key, value, pse, sink, std::move(call));
    stack->emplace_back(results[0]);
    for (size_t i = 1; i < 4; ++i) stack->emplace_back(without_gradient(results[i]));
    if (op.schema().returns().size() == 6) {
      stack->emplace_back(results[4]);
      stack->emplace_back(named.has("dropout_offset") ? *offset : results[5]);
      return;
    }
    stack->emplace_back(results[4].item<int64_t>());
    stack->emplace_back(offset->item<int64_t>());
    stack->emplace_back(int64_t{0});
  });
}

ContractBackwardCall read_backward(const Named& named) {
  ContractBackwardCall call{.query = *named.tensor("query"),
                            .key = *named.tensor("key"),
                            .value = *named.tensor("value"),
                            .dy = *named.tensor("dy"),
                            .max = named.tensor("softmax_max"),
                            .sum = named.tensor("softmax_sum"),
                            .out = named.tensor("attention_in"),
                            .arguments = read(named)};
  const bool has_numbers = named.has("numels");
  for (const auto& [name, number] :
       {std::pair("seed", &call.arguments.seed), std::pair("offset", &call.arguments.offset)}) {
    *number = has_numbers ? one_number(named.at(name).toInt()) : named.tensor(name);
  }
  return call;
}

void grad_op(const c10::OperatorHandle& op, Stack* stack) {
  const Named named(op, *stack);
  tell_peers_of(named, [&] {
    const ContractBackwardCall call = read_backward(named);
    const ContractArguments& a = call.arguments;
    ContractOpGradients g = call_contract_backward(call);
    stack->emplace_back(std::move(g.dq));
    stack->emplace_back(std::move(g.dk));
    stack->emplace_back(std::move(g.dv));
    stack->emplace_back(a.pse && !a.has_slopes() ? std::move(g.dpse) : Tensor());
    if (op.schema().returns().size() == 7) {
      // dq_rope, dk_rope
      stack->emplace_back(Tensor());
      stack->emplace_back(Tensor());
    }
    stack->emplace_back(std::move(g.dsink));
  });
}

// One bit for each of the first numel(size) pairs, 1 = kept, little-endian in a byte; whole groups of 128 bits.
Tensor dropout_gen_mask(const Tensor&, at::IntArrayRef size, double p, int64_t seed, int64_t offset, bool, bool) {
  constexpr int64_t kBitsAtOnce = 128, kBitsOfByte = 8;
  TORCH_CHECK(p >= 0 && p < 1, "p is ", p, "; it must be at least 0 and below 1");
  const int64_t count = c10::multiply_integers(size);
  const Tensor mask = at::zeros({(count + kBitsAtOnce - 1) / kBitsAtOnce * (kBitsAtOnce / kBitsOfByte)}, at::kByte);
  auto* bytes = mask.mutable_data_ptr<uint8_t>();
  const uint32_t threshold = keep_threshold(p);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t draw =
        draw_of_pair(static_cast<uint64_t>(seed), static_cast<uint64_t>(offset), static_cast<uint64_t>(i));
    if (p == 0 || draw < threshold) bytes[i / kBitsOfByte] |= static_cast<uint8_t>(1U << (i % kBitsOfByte));
  }
  return mask;
}

// -------------------------------------------------------------------------------------------------------- schemas

struct Version {
  string tokens;     // how pre and next are spelled
  string lengths;    // type of the lengths
  string prefix;     // type of the prefix
  string rope, pse;  // v2 only
  bool is_third;
};

string forward_schema(const string& name, const Version& v, bool keywords, const string& group) {
  return name + "(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, " + (keywords ? "*, " : "") +
         "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, " + v.rope +
         "float scale=1.0, float keep_prob=1.0, int pre_" + v.tokens + "=2147483647, int next_" + v.tokens +
         "=2147483647, int inner_precise=0, " + v.prefix + " prefix=None, " + v.lengths + " actual_seq_qlen=None, " +
         v.lengths + " actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, " +
         v.pse + "str softmax_layout=\"\", Tensor? sink=None" +
         (v.is_third ? "" : ", Tensor? dropout_mask=None, int seed=0, int offset=0") + group +
         ") -> (Tensor attention_out, Tensor softmax_max, Tensor softmax_sum, Tensor softmax_out, " +
         (v.is_third ? "Tensor seed, Tensor offset)" : "int seed, int offset, int numels)");
}

string grad_schema(const string& name, const Version& v, const string& group) {
  return name +
         "(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, "
         "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, "
         "Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, " +
         v.rope + "float scale_value=1.0, float keep_prob=1.0, int pre_" + v.tokens + "=2147483647, int next_" +
         v.tokens + "=2147483647, int inner_precise=0, " +
         (v.is_third ? "Tensor? seed=None, Tensor? offset=None, " : "int seed=0, int offset=0, int numels=0, ") +
         v.prefix + " prefix=None, " + v.lengths + " actual_seq_qlen=None, " + v.lengths +
         " actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, " + v.pse +
         "str softmax_layout=\"\", Tensor? sink=None" + group + ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dpse, " +
         (v.rope.empty() ? "" : "Tensor dq_rope, Tensor dk_rope, ") + "Tensor dsink)";
}

const Version kV1{"tockens", "int[]?", "int[]?", "", "", false};
const Version kV2{"tokens",
                  "int[]?",
                  "int[]?",
                  "Tensor? query_rope=None, Tensor? key_rope=None, ",
                  "int pse_type=1, int[]? q_start_idx=None, int[]? kv_start_idx=None, ",
                  false};
const Version kV3{"tockens", "Tensor?", "SymInt[]?", "", "", true};
// Further keywords; where they are a schema's first, kStar comes before them.
const string kStar = ", *";
const string kGroup =
    ", str group_name, Tensor? q_map=None, Tensor? kv_map=None, str schedule=\"auto\", str exchange=\"auto\"";
const string kSeeds = ", Tensor dropout_seed, Tensor dropout_offset";

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  const std::vector<at::Tag> traced = {at::Tag::pt2_compliant_tag}, seeded = {at::Tag::nondeterministic_seeded};
  m.def(forward_schema("fusion_attention", kV1, false, "").c_str(), seeded);
  m.def(forward_schema("fusion_attention_v2", kV2, true, "").c_str(), seeded);
  m.def(forward_schema("fusion_attention_v3", kV3, false, "").c_str(), traced);
  m.def(forward_schema("fusion_attention_v3.cp", kV3, false, kStar + kGroup).c_str(), traced);
  m.def(forward_schema("fusion_attention.seeded", kV1, false, kStar + kSeeds).c_str(), traced);
  m.def(forward_schema("fusion_attention_v2.seeded", kV2, true, kSeeds).c_str(), traced);
  m.def(forward_schema("fusion_attention_v3.seeded", kV3, false, kStar + kSeeds).c_str(), traced);
  m.def(grad_schema("fusion_attention_grad", kV1, "").c_str(), traced);
  m.def(grad_schema("fusion_attention_grad_v2", kV2, "").c_str(), traced);
  m.def(grad_schema("fusion_attention_grad_v3", kV3, "").c_str(), traced);
  m.def(grad_schema("fusion_attention_grad_v3.cp", kV3, kGroup).c_str(), traced);
  m.def(
      "_dropout_gen_mask(Tensor self, int[] size, float p, int seed, int offset, *, bool parallel=True, "
      "bool sync=False) -> Tensor",
      traced);
}

TORCH_LIBRARY_IMPL(ringspan, CompositeImplicitAutograd, m) {
  for (const char* name : {"fusion_attention", "fusion_attention_v2", "fusion_attention_v3", "fusion_attention_v3.cp",
                           "fusion_attention.seeded", "fusion_attention_v2.seeded", "fusion_attention_v3.seeded"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&forward_op>());
  }
  for (const char* name : {"fusion_attention_grad", "fusion_attention_grad_v2", "fusion_attention_grad_v3",
                           "fusion_attention_grad_v3.cp"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&grad_op>());
  }
}

TORCH_LIBRARY_IMPL(ringspan, CompositeExplicitAutograd, m) { m.impl("_dropout_gen_mask", &dropout_gen_mask); }

}  // namespace ringspan::binding
