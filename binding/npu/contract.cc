#include "binding/npu/contract.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include <ATen/ATen.h>

#include "ringspan/base/error.h"

#include "binding/base/tensors.h"

namespace ringspan::binding {
namespace {

using at::Tensor;

constexpr int64_t kCompressed = 2048, kCompressedPrefixRows = 3072;

bool is_full_mask_mode(int64_t mode) { return mode == 0 || mode == 1 || mode == 5; }

void check_dims(const char* name, const Tensor& tensor, const Axes& axes, const std::string& layout) {
  RINGSPAN_CHECK(tensor.dim() == axes.dims, name, " has ", tensor.dim(), " dimensions; input_layout ", layout, " has ",
                 axes.dims);
}

void check_equal(const char* what, int64_t in_query, const char* other, int64_t in_other) {
  RINGSPAN_CHECK(in_query == in_other, what, " is ", in_query, " in query and ", in_other, " in ", other,
                 "; they must be equal");
}

// Heads and head dims where they share the last axis.
void split_hidden(const Tensor& query, const Tensor& key, const Tensor& value, int64_t head_num, ContractSizes& sizes) {
  const int64_t q = query.size(2), k = key.size(2), v = value.size(2);
  RINGSPAN_CHECK(q > 0 && q % head_num == 0, "query has H = ", q, ", which head_num ", head_num, " does not divide");
  sizes.q_heads = head_num;
  sizes.qk_dim = q / head_num;
  RINGSPAN_CHECK(k > 0 && k % sizes.qk_dim == 0, "key has H = ", k, ", which the head dim ", sizes.qk_dim,
                 " of query does not divide");
  sizes.kv_heads = k / sizes.qk_dim;
  RINGSPAN_CHECK(v > 0 && v % sizes.kv_heads == 0, "value has H = ", v, ", which the ", sizes.kv_heads,
                 " heads of key do not divide");
  sizes.v_dim = v / sizes.kv_heads;
}

void read_head_axis(const Tensor& query, const Tensor& key, const Tensor& value, int64_t head_num, int64_t axis,
                    ContractSizes& sizes) {
  sizes.q_heads = query.size(axis);
  RINGSPAN_CHECK(head_num == sizes.q_heads, "head_num is ", head_num, " and query has ", sizes.q_heads, " heads");
  sizes.kv_heads = key.size(axis);
  RINGSPAN_CHECK(value.size(axis) == sizes.kv_heads, "key has ", sizes.kv_heads, " heads and value ", value.size(axis));
  sizes.qk_dim = query.size(-1);
  check_equal("the head dim", sizes.qk_dim, "key", key.size(-1));
  sizes.v_dim = value.size(-1);
}

void check_mask_shape(const ContractArguments& a, const ContractSizes& s, int64_t kv_len) {
  const Tensor& mask = *a.atten_mask;
  RINGSPAN_CHECK(mask.scalar_type() == at::kBool || mask.scalar_type() == at::kByte, "atten_mask is ",
                 toString(mask.scalar_type()), "; it must be Bool or Byte, 1 = masked");
  const auto shape = mask.sizes();
  if (!is_full_mask_mode(a.sparse_mode)) {
    const int64_t rows = a.sparse_mode == 6 ? kCompressedPrefixRows : kCompressed;
    const bool leading = mask.dim() == 2 || (mask.dim() == 4 && shape[0] == 1 && shape[1] == 1);
    RINGSPAN_CHECK(leading && mask.size(-2) == rows && mask.size(-1) == kCompressed, "atten_mask has shape ", shape,
                   "; sparse_mode ", a.sparse_mode, " takes the compressed [", rows, ", ", kCompressed, "]");
    return;
  }
  // TND: the largest document, checked where the documents are known.
  if (s.layout == Layout::kTND) {
    RINGSPAN_CHECK(mask.dim() == 2, "atten_mask has ", mask.dim(), " dimensions; with TND it has 2");
    return;
  }
  const bool two = mask.dim() == 2, four = mask.dim() == 4;
  const bool tail = (two || four) && mask.size(-2) == s.q_rows && mask.size(-1) == kv_len;
  const bool head = two || (four && ((shape[0] == 1 && shape[1] == 1) || (shape[0] == s.batch && shape[1] == 1) ||
                                     (shape[0] == s.batch && shape[1] == s.q_heads)));
  RINGSPAN_CHECK(tail && head, "atten_mask has shape ", shape, "; it must be [", s.q_rows, ", ", kv_len, "], [1, 1, ",
                 s.q_rows, ", ", kv_len, "], [", s.batch, ", 1, ...] or [", s.batch, ", ", s.q_heads, ", ...]");
  RINGSPAN_CHECK(a.sparse_mode != 5 || s.batch == 1 || (four && shape[0] == s.batch), "sparse_mode 5 with ", s.batch,
                 " batch entries needs a mask for each; atten_mask has shape ", shape);
}

// "4 or 1", "1"
std::string one_or(int64_t size) { return size == 1 ? "1" : concat(size, " or 1"); }

void check_pse(const ContractArguments& a, const ContractSizes& s, at::ScalarType dtype, int64_t q_len,
               int64_t kv_len) {
  if (!a.pse) {
    RINGSPAN_CHECK(a.type_of_pse() == PseType::kBeforeScale, "pse_type is ", a.pse_type, " and pse is not given");
    return;
  }
  const Tensor& pse = *a.pse;
  if (a.type_of_pse() == PseType::kSlopes || a.type_of_pse() == PseType::kRootSlopes) {
    RINGSPAN_CHECK(pse.scalar_type() == at::kFloat, "pse is ", toString(pse.scalar_type()),
                   "; slopes (pse_type 2, 3) are Float");
    const bool fits = (pse.dim() == 1 && pse.size(0) == s.q_heads) ||
                      (pse.dim() == 2 && pse.size(0) == s.batch && pse.size(1) == s.q_heads);
    RINGSPAN_CHECK(fits, "pse has shape ", pse.sizes(), "; slopes are [", s.q_heads, "] or [", s.batch, ", ", s.q_heads,
                   "]");
    RINGSPAN_CHECK(s.layout == Layout::kTND || q_len == kv_len,
                   "pse_type 2 and 3 need as many queries as keys; there "
                   "are ",
                   q_len, " and ", kv_len);
    return;
  }
  RINGSPAN_CHECK(s.layout != Layout::kTND, "pse is not offered with TND; use slopes (v2, pse_type 2 or 3)");
  RINGSPAN_CHECK(pse.scalar_type() == dtype, "pse is ", toString(pse.scalar_type()), " and query ", toString(dtype),
                 "; they must be alike");
  const bool fits = pse.dim() == 4 && (pse.size(0) == s.batch || pse.size(0) == 1) && pse.size(1) == s.q_heads &&
                    (pse.size(2) == s.q_rows || pse.size(2) == 1) && pse.size(3) == kv_len;
  RINGSPAN_CHECK(fits, "pse has shape ", pse.sizes(), "; offered is [", one_or(s.batch), ", ", s.q_heads, ", ",
                 one_or(s.q_rows), ", ", kv_len, "]");
}

void check_sink(const ContractArguments& a, const ContractSizes& s) {
  if (!a.sink) return;
  RINGSPAN_CHECK(a.sink->scalar_type() == at::kFloat && a.sink->dim() == 1 && a.sink->size(0) == s.q_heads, "sink is ",
                 toString(a.sink->scalar_type()), " ", a.sink->sizes(), "; it must be Float [", s.q_heads, "]");
}

void check_lengths_given(const ContractArguments& a, const ContractSizes& s) {
  if (s.layout == Layout::kTND) {
    RINGSPAN_CHECK(a.q_ends && a.kv_ends, "TND needs actual_seq_qlen and actual_seq_kvlen; ",
                   a.q_ends    ? "actual_seq_kvlen is"
                   : a.kv_ends ? "actual_seq_qlen is"
                               : "both are",
                   " missing");
    return;
  }
  RINGSPAN_CHECK(!a.q_ends && !a.kv_ends, "actual_seq_qlen and actual_seq_kvlen are for TND; input_layout is ",
                 name_of(s.layout));
}

}  // namespace

Layout parse_contract_layout(const std::string& input_layout) {
  std::string upper = input_layout;
  std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return std::toupper(c); });
  return parse_layout(upper);
}

ContractSizes read_contract_sizes(const Tensor& query, const Tensor& key, const Tensor& value, int64_t head_num,
                                  const std::string& input_layout) {
  ContractSizes sizes{.layout = parse_contract_layout(input_layout)};
  RINGSPAN_CHECK(head_num > 0, "head_num is ", head_num, "; it must be at least 1");
  const Axes axes = axes_of(sizes.layout);
  for (const auto& [name, tensor] : {std::pair("query", &query), std::pair("key", &key), std::pair("value", &value)}) {
    check_dims(name, *tensor, axes, name_of(sizes.layout));
    RINGSPAN_CHECK(tensor->scalar_type() == query.scalar_type(), "query is ", toString(query.scalar_type()), " and ",
                   name, " is ", toString(tensor->scalar_type()), "; they must be alike");
  }
  const at::ScalarType dtype = query.scalar_type();
  RINGSPAN_CHECK(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat, "query is ", toString(dtype),
                 "; it must be Half, BFloat16 or Float");
  if (axes.head >= 0) {
    read_head_axis(query, key, value, head_num, axes.head, sizes);
  } else {
    split_hidden(query, key, value, head_num, sizes);
  }
  RINGSPAN_CHECK(1 <= sizes.qk_dim && sizes.qk_dim <= kMaxHeadDim, "the head dim is ", sizes.qk_dim,
                 "; it must be in 1..", kMaxHeadDim);
  RINGSPAN_CHECK(1 <= sizes.v_dim && sizes.v_dim <= sizes.qk_dim, "the head dim of value is ", sizes.v_dim,
                 "; it must be in 1..", sizes.qk_dim, ", that of key");
  RINGSPAN_CHECK(sizes.kv_heads >= 1 && sizes.q_heads % sizes.kv_heads == 0, "query has ", sizes.q_heads,
                 " heads, which is no multiple of the ", sizes.kv_heads, " of key");
  if (axes.batch >= 0) {
    sizes.batch = query.size(axes.batch);
    check_equal("B", sizes.batch, "key", key.size(axes.batch));
    check_equal("B", sizes.batch, "value", value.size(axes.batch));
  }
  sizes.q_rows = query.size(axes.row);
  sizes.kv_rows = key.size(axes.row);
  RINGSPAN_CHECK(value.size(axes.row) == sizes.kv_rows, "key has ", sizes.kv_rows, " rows and value ",
                 value.size(axes.row));
  return sizes;
}

void check_contract(const ContractArguments& a, const ContractSizes& s, at::ScalarType dtype, int64_t q_len,
                    int64_t kv_len) {
  RINGSPAN_CHECK(!a.padding_mask, "padding_mask is not offered; mask with atten_mask, or leave keys out by lengths");
  RINGSPAN_CHECK(std::isfinite(a.scale), "scale is ", a.scale, "; it must be finite");
  RINGSPAN_CHECK(a.keep_prob > 0 && a.keep_prob <= 1, "keep_prob is ", a.keep_prob, "; it must be in (0, 1]");
  RINGSPAN_CHECK(0 <= a.pse_type && a.pse_type <= 3, "pse_type is ", a.pse_type, "; it must be 0, 1, 2 or 3");
  RINGSPAN_CHECK(0 <= a.inner_precise && a.inner_precise <= 2, "inner_precise is ", a.inner_precise,
                 "; it must be 0, 1 or 2");
  const bool tnd = s.layout == Layout::kTND;
  RINGSPAN_CHECK(0 <= a.sparse_mode && a.sparse_mode <= (tnd ? 8 : 6) && !(tnd && a.sparse_mode == 5),
                 "sparse_mode is ", a.sparse_mode, "; ", name_of(s.layout), " takes ", tnd ? "0..4 and 6..8" : "0..6");
  RINGSPAN_CHECK(a.softmax_layout.empty() || (a.softmax_layout == "TND" && tnd), "softmax_layout is \"",
                 a.softmax_layout, "\"; it must be \"\", or \"TND\" with input_layout TND");
  check_lengths_given(a, s);
  if (a.atten_mask) check_mask_shape(a, s, kv_len);
  check_pse(a, s, dtype, q_len, kv_len);
  check_sink(a, s);
}

ContractCall read_contract(const ContractArguments& a, const ContractSizes& s, at::ScalarType dtype, int64_t q_len,
                           int64_t kv_len) {
  check_contract(a, s, dtype, q_len, kv_len);
  ContractCall call{.sizes = s, .q_len = q_len, .kv_len = kv_len};
  if (s.layout == Layout::kTND) {
    call.documents = read_documents(read_ends("actual_seq_qlen", *a.q_ends), read_ends("actual_seq_kvlen", *a.kv_ends),
                                    q_len, kv_len);
  }
  check_tokens(a, s, q_len, kv_len, call.documents);
  fill_mask(a, q_len, kv_len, call);
  PairArguments& pairs = call.pairs;
  pairs.inputs.dropout.p = 1 - a.keep_prob;
  pairs.total_heads = s.q_heads;
  if (a.type_of_pse() == PseType::kSlopes || a.type_of_pse() == PseType::kRootSlopes) {
    pairs.slopes = a.pse;
    pairs.inputs.slope_shift = a.slope_shift;
    pairs.inputs.slope_of_root = a.type_of_pse() == PseType::kRootSlopes;
  } else {
    pairs.bias = a.pse;
    pairs.inputs.bias_factor = a.type_of_pse() == PseType::kBeforeScale ? a.scale : 1;
  }
  // The documents' own order, and positions inside a document.
  uint64_t origin = 0;
  for (const Document& d : call.documents) {
    const auto row = static_cast<uint64_t>(d.kv_len), head = static_cast<uint64_t>(d.q_len) * row;
    if (d.q_len > 0) pairs.grids.push_back({d.q_begin, d.kv_begin, origin, 0, head, row});
    origin += static_cast<uint64_t>(s.q_heads) * head;
  }
  return call;
}

std::optional<std::vector<int64_t>> read_prefix(const ContractArguments& a) {
  if (!a.prefix) return std::nullopt;
  std::vector<int64_t> prefix;
  for (const c10::SymInt& length : *a.prefix) prefix.push_back(number_of(length));
  return prefix;
}

std::vector<int64_t> read_ends(const char* name, const Tensor& ends) {
  RINGSPAN_CHECK(ends.device().is_cpu(), name, " lies on ", ends.device().str(), "; it must be on the CPU");
  RINGSPAN_CHECK(at::isIntegralType(ends.scalar_type(), /*includeBool=*/false), name, " is ",
                 toString(ends.scalar_type()), "; it must hold integers");
  RINGSPAN_CHECK(ends.dim() == 1 && ends.numel() > 0, name, " has shape ", ends.sizes(),
                 "; it must be one-dimensional, with at least one document");
  const Tensor dense = ends.to(at::kLong).contiguous();
  const int64_t* data = dense.const_data_ptr<int64_t>();
  return {data, data + dense.numel()};
}

}  // namespace ringspan::binding
