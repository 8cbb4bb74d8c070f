#include "binding/npu/stats.h"

#include <cfloat>
#include <limits>

#include <ATen/ATen.h>

namespace ringspan::binding {
namespace {

using at::Tensor;

// Begins and lengths of the documents that have rows, and of what lies behind them.
template <class Visit>
void for_each_run(const std::vector<Document>& documents, int64_t rows, const Visit& visit) {
  int64_t end = 0;
  for (const Document& d : documents) {
    if (d.q_len > 0) visit(d.q_begin, d.q_len);
    end = d.q_begin + d.q_len;
  }
  if (rows > end) visit(end, rows - end);
}

// Not contiguous(), which keeps the odd strides of a tensor without elements.
Tensor dense(const Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options()).copy_(tensor); }

}  // namespace

Tensor is_empty_row(const Tensor& max, const Tensor& sum) { return at::logical_and(max == -FLT_MAX, sum == FLT_MAX); }

std::vector<int64_t> contract_stats_shape(const ContractSizes& s) {
  if (s.layout == Layout::kTND) return {s.q_rows, s.q_heads, kStatSlots};
  return {s.batch, s.q_heads, s.q_rows, kStatSlots};
}

Tensor to_document_order(const Tensor& rows, const std::vector<Document>& documents) {
  const int64_t heads = rows.size(0), count = rows.size(1);
  std::vector<Tensor> parts = {at::empty({0}, rows.options())};
  for_each_run(documents, count,
               [&](int64_t begin, int64_t length) { parts.push_back(rows.narrow(1, begin, length).reshape({-1})); });
  return at::cat(parts).view({count, heads, kStatSlots});
}

Tensor from_document_order(const Tensor& stats, const std::vector<Document>& documents) {
  const int64_t count = stats.size(0), heads = stats.size(1);
  const Tensor flat = stats.reshape({-1});
  std::vector<Tensor> parts = {at::empty({heads, 0, kStatSlots}, stats.options())};
  for_each_run(documents, count, [&](int64_t begin, int64_t length) {
    parts.push_back(
        flat.narrow(0, begin * heads * kStatSlots, length * heads * kStatSlots).view({heads, length, kStatSlots}));
  });
  return at::cat(parts, 1);
}

ContractStats to_contract_stats(const Tensor& max, const Tensor& sum, const ContractCall& call,
                                const std::string& softmax_layout) {
  const Tensor empty = sum == 0;
  const auto convert = [&](const Tensor& values, double of_empty) {
    const Tensor slots = at::where(empty, at::scalar_tensor(of_empty, values.options()), values)
                             .unsqueeze(-1)
                             .expand({values.size(0), values.size(1), values.size(2), kStatSlots});
    if (call.sizes.layout != Layout::kTND) return dense(slots);
    if (softmax_layout == "TND") return dense(slots[0].transpose(0, 1));
    return to_document_order(slots[0], call.documents);
  };
  return {convert(max, -FLT_MAX), convert(sum, FLT_MAX)};
}

Tensor lse_of_contract_stats(const ContractStats& stats, const ContractCall& call, const std::string& softmax_layout) {
  const auto rows_of = [&](const Tensor& values) {
    if (call.sizes.layout != Layout::kTND) return values.select(-1, 0);
    const Tensor rows = softmax_layout == "TND" ? values.transpose(0, 1) : from_document_order(values, call.documents);
    return rows.select(-1, 0).unsqueeze(0);
  };
  const Tensor max = rows_of(stats.max), sum = rows_of(stats.sum);
  const Tensor empty = is_empty_row(max, sum);
  // In double: a large maximum must not swallow the logarithm's digits before the one rounding.
  const Tensor lse = (max.to(at::kDouble) + sum.to(at::kDouble).log()).to(at::kFloat);
  return at::where(empty, at::scalar_tensor(-std::numeric_limits<double>::infinity(), lse.options()), lse).contiguous();
}

}  // namespace ringspan::binding
