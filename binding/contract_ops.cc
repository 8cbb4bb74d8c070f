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

#include "binding/contract_inner.h"

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
  return (*starts)[0].guard_int(__FILE__, __LINE__);
}

ContractOpArguments read(const Named& named) {
  refuse_given(named, "query_rope", "it is not offered, join it to query along the head dim");
  refuse_given(named, "key_rope", "it is not offered, join it to key along the head dim");
  refuse_given(named, "dropout_mask", "it is not offered, dropout is drawn from seed and offset");
  ContractOpArguments a;
  a.head_num = named.at("head_num").toInt();
  a.input_layout = named.at("input_layout").toStringRef();
  a.pse = named.tensor("pse");
  a.padding_mask = named.tensor("padding_mask");
  a.atten_mask = named.tensor("atten_mask");
  a.scale = named.either("scale", "scale_value").toDouble();
  a.keep_prob = named.at("keep_prob").toDouble();
  a.pre_tokens = named.either("pre_tockens", "pre_tokens").toInt();
  a.next_tokens = named.either("next_tockens", "next_tokens").toInt();
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
void fill_seed(const Named& named, ContractOpArguments& a) {
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

// Tensors of the arguments in a fixed order, and back: those must be saved as variables.
constexpr std::optional<Tensor> ContractOpArguments::* kTensors[] = {
    &ContractOpArguments::pse,     &ContractOpArguments::atten_mask, &ContractOpArguments::q_ends,
    &ContractOpArguments::kv_ends, &ContractOpArguments::sink,       &ContractOpArguments::seed,
    &ContractOpArguments::offset,  &ContractOpArguments::q_map,      &ContractOpArguments::kv_map};

void save_numbers(AutogradContext& context, const ContractOpArguments& a) {
  auto& data = context.saved_data;
  data["ints"] = std::vector<int64_t>{a.head_num,    a.pre_tokens, a.next_tokens, a.inner_precise,
                                      a.sparse_mode, a.pse_type,   a.slope_shift, a.in_group};
  data["floats"] = std::vector<double>{a.scale, a.keep_prob};
  data["input_layout"] = a.input_layout;
  data["softmax_layout"] = a.softmax_layout;
  data["group_name"] = a.group_name;
  data["schedule"] = a.schedule;
  data["exchange"] = a.exchange;
  data["prefix"] = a.prefix ? IValue(c10::SymIntArrayRef(*a.prefix)) : IValue();
}

ContractOpArguments restore_numbers(const AutogradContext& context) {
  const auto& data = context.saved_data;
  const std::vector<int64_t> ints = data.at("ints").toIntVector();
  const std::vector<double> floats = data.at("floats").toDoubleVector();
  ContractOpArguments a;
  a.head_num = ints[0];
  a.pre_tokens = ints[1];
  a.next_tokens = ints[2];
  a.inner_precise = ints[3];
  a.sparse_mode = ints[4];
  a.pse_type = ints[5];
  a.slope_shift = ints[6];
  a.in_group = ints[7] != 0;
  a.scale = floats[0];
  a.keep_prob = floats[1];
  a.input_layout = data.at("input_layout").toStringRef();
  a.softmax_layout = data.at("softmax_layout").toStringRef();
  a.group_name = data.at("group_name").toStringRef();
  a.schedule = data.at("schedule").toStringRef();
  a.exchange = data.at("exchange").toStringRef();
  a.prefix = ints_of(data.at("prefix"));
  return a;
}

struct ContractFunction : torch::autograd::Function<ContractFunction> {
  static variable_list forward(AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value,
                               const std::optional<Tensor>& /*pse*/, const std::optional<Tensor>& /*sink*/,
                               ContractOpArguments a) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const ContractOpResult result = call_contract_forward(query, key, value, a);
    a.seed = result.seed;
    variable_list saved = {query, key, value, result.out, result.max, result.sum};
    if (!result.kept.empty()) {
      std::copy_n(result.kept.begin(), 3, saved.begin() + 3);
      if (result.kept[3].numel() > 0) a.q_map = result.kept[3];
      if (result.kept[4].numel() > 0) a.kv_map = result.kept[4];
    }
    context->saved_data["are_parts"] = !result.kept.empty();
    for (const auto member : kTensors) saved.push_back((a.*member).value_or(Tensor()));
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    save_numbers(*context, a);
    return {result.out, result.max, result.sum, result.softmax_out, result.seed, result.offset};
  }

  // Gradients that flow into the statistics are not used, as the contract says.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "ringspan::fusion_attention has no second derivative; call backward() without create_graph=True");
    const variable_list saved = context->get_saved_variables();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ContractOpArguments a = restore_numbers(*context);
    size_t next = 6;
    for (const auto member : kTensors) {
      if (saved[next].defined()) a.*member = saved[next];
      ++next;
    }
    variable_list result(6);
    if (!gradients[0].defined()) return result;
    ContractOpGradients g = call_contract_backward(saved[0], saved[1], saved[2],
                                                   {.dy = gradients[0],
                                                    .max = saved[4],
                                                    .sum = saved[5],
                                                    .out = saved[3],
                                                    .are_parts = context->saved_data.at("are_parts").toBool()},
                                                   a);
    // Asked for by the place among the tensors that were given.
    const size_t sink_place = a.pse ? 4 : 3;
    if (context->needs_input_grad(0)) result[0] = std::move(g.dq);
    if (context->needs_input_grad(1)) result[1] = std::move(g.dk);
    if (context->needs_input_grad(2)) result[2] = std::move(g.dv);
    if (a.pse && a.pse_type <= 1 && context->needs_input_grad(3)) result[3] = std::move(g.dpse);
    if (a.sink && context->needs_input_grad(sink_place)) result[4] = std::move(g.dsink);
    return result;
  }
};

// ------------------------------------------------------------------------------------------------------ boxed ops

void forward_op(const c10::OperatorHandle& op, Stack* stack) {
  const Named named(op, *stack);
  ContractOpArguments a = read(named);
  TORCH_CHECK(a.pse_type <= 1 || !a.pse || !a.pse->requires_grad() || !at::GradMode::is_enabled(),
              "pse requires a gradient; slopes (pse_type 2, 3) have none, detach them");
  fill_seed(named, a);
  const variable_list results =
      ContractFunction::apply(*named.tensor("query"), *named.tensor("key"), *named.tensor("value"), a.pse, a.sink, a);
  for (size_t i = 0; i < 4; ++i) stack->emplace_back(results[i]);
  if (op.schema().returns().size() == 6) {
    stack->emplace_back(results[4]);
    stack->emplace_back(named.has("dropout_offset") ? *a.offset : results[5]);
    return;
  }
  stack->emplace_back(results[4].item<int64_t>());
  stack->emplace_back(a.offset->item<int64_t>());
  stack->emplace_back(int64_t{0});
}

void grad_op(const c10::OperatorHandle& op, Stack* stack) {
  const Named named(op, *stack);
  ContractOpArguments a = read(named);
  if (named.has("numels")) {
    a.seed = one_number(named.at("seed").toInt());
    a.offset = one_number(named.at("offset").toInt());
  } else {
    a.seed = named.tensor("seed");
    a.offset = named.tensor("offset");
  }
  ContractOpGradients g = call_contract_backward(
      *named.tensor("query"), *named.tensor("key"), *named.tensor("value"),
      {*named.tensor("dy"), named.tensor("softmax_max"), named.tensor("softmax_sum"), named.tensor("attention_in")}, a);
  stack->emplace_back(std::move(g.dq));
  stack->emplace_back(std::move(g.dk));
  stack->emplace_back(std::move(g.dv));
  stack->emplace_back(a.pse && a.pse_type <= 1 ? std::move(g.dpse) : Tensor());
  if (op.schema().returns().size() == 7) {
    // dq_rope, dk_rope
    stack->emplace_back(Tensor());
    stack->emplace_back(Tensor());
  }
  stack->emplace_back(std::move(g.dsink));
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
const char* const kGroup =
    ", *, str group_name, Tensor? q_map=None, Tensor? kv_map=None, str schedule=\"auto\", str exchange=\"auto\"";
const char* const kGroupAfterKeywords =
    ", str group_name, Tensor? q_map=None, Tensor? kv_map=None, str schedule=\"auto\", str exchange=\"auto\"";

const char* const kSeeds = ", *, Tensor dropout_seed, Tensor dropout_offset";
const char* const kSeedsAfterKeywords = ", Tensor dropout_seed, Tensor dropout_offset";

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  const std::vector<at::Tag> traced = {at::Tag::pt2_compliant_tag}, seeded = {at::Tag::nondeterministic_seeded};
  m.def(forward_schema("fusion_attention", kV1, false, "").c_str(), seeded);
  m.def(forward_schema("fusion_attention_v2", kV2, true, "").c_str(), seeded);
  m.def(forward_schema("fusion_attention_v3", kV3, false, "").c_str(), traced);
  m.def(forward_schema("fusion_attention_v3.cp", kV3, false, kGroup).c_str(), traced);
  m.def(forward_schema("fusion_attention.seeded", kV1, false, kSeeds).c_str(), traced);
  m.def(forward_schema("fusion_attention_v2.seeded", kV2, true, kSeedsAfterKeywords).c_str(), traced);
  m.def(forward_schema("fusion_attention_v3.seeded", kV3, false, kSeeds).c_str(), traced);
  m.def(grad_schema("fusion_attention_grad", kV1, "").c_str(), traced);
  m.def(grad_schema("fusion_attention_grad_v2", kV2, "").c_str(), traced);
  m.def(grad_schema("fusion_attention_grad_v3", kV3, "").c_str(), traced);
  m.def(grad_schema("fusion_attention_grad_v3.cp", kV3, kGroupAfterKeywords).c_str(), traced);
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
