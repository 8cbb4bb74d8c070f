// The two inner ops: attention over a group without autograd, forward and backward. Opaque to tracing: the kernels run
// the ring, the Meta kernels only know shapes.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

namespace ringspan::binding {

// out, max, sum, lse, number of the call (int64 [1], 0 where nothing was agreed)
using ForwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// dq, dk, dv, dsink (this rank's part, in the dtype of sink; empty [0] where there is none)
using BackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

ForwardResult call_attention_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                     const std::optional<at::Tensor>& sink, c10::SymIntArrayRef spec,
                                     at::TensorList tables, double scale, const std::string& layout,
                                     c10::SymInt num_heads, const std::string& group_name, const std::string& schedule,
                                     const std::string& exchange, bool assume_agreed, bool needs_grad);

BackwardResult call_attention_backward(const std::optional<at::Tensor>& grad_out,
                                       const std::optional<at::Tensor>& grad_lse, const at::Tensor& query,
                                       const at::Tensor& key, const at::Tensor& value,
                                       const std::optional<at::Tensor>& sink, const at::Tensor& out,
                                       const at::Tensor& lse, const at::Tensor& call_number, c10::SymIntArrayRef spec,
                                       at::TensorList tables, double scale, const std::string& layout,
                                       c10::SymInt num_heads, const std::string& group_name,
                                       const std::string& schedule, const std::string& exchange, bool assume_agreed);

}  // namespace ringspan::binding
