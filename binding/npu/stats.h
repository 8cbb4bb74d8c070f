// The statistics of the contract: fp32, eight equal slots, [B, N, S, 8] or for TND [T, N, 8], and an empty row as
// max -FLT_MAX, sum +FLT_MAX. Between these and the core's [B, N, S].
//
// TND without softmax_layout "TND" only looks like [T, N, 8]: its memory holds one document after the other, each as
// [N, Sq, 8]. Two documents of 2 and 1 tokens, 2 heads (n.t = head n, token t):
//
//     "TND"   0.0 1.0 0.1 1.1 | 0.2 1.2          ""   0.0 0.1 1.0 1.1 | 0.2 1.2
#pragma once

#include <ATen/core/Tensor.h>

#include "binding/npu/contract.h"

namespace ringspan::binding {

constexpr int64_t kStatSlots = 8;

struct ContractStats {
  at::Tensor max, sum;
};

// Bool, slot by slot: the values of an empty row, both of them.
at::Tensor is_empty_row(const at::Tensor& max, const at::Tensor& sum);

// Shape of each.
std::vector<int64_t> contract_stats_shape(const ContractSizes& sizes);

// From the core's max and sum.
ContractStats to_contract_stats(const at::Tensor& max, const at::Tensor& sum, const ContractCall& call,
                                const std::string& softmax_layout);
// The core's lse of them, [B, N, S]; -inf for an empty row. Slot 0 counts.
at::Tensor lse_of_contract_stats(const ContractStats& stats, const ContractCall& call,
                                 const std::string& softmax_layout);

// The rows of [T, N, 8] in true order, [N, T, 8], from the order by documents, and back.
at::Tensor from_document_order(const at::Tensor& stats, const std::vector<Document>& documents);
at::Tensor to_document_order(const at::Tensor& rows, const std::vector<Document>& documents);

}  // namespace ringspan::binding
