// The two inner ops: attention over a group without autograd, forward and backward. Opaque to tracing: the kernels run
// the ring, the Meta kernels only know shapes.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

namespace ringspan::binding {

// The arguments that the public op and the inner ops share, apart from query, key and value.
struct OpArguments {
  std::optional<at::Tensor> sink, bias, attn_mask, slopes;
  std::optional<at::Tensor> seed;  // int64 [1]
  std::vector<c10::SymInt> spec;
  std::vector<at::Tensor> tables;
  double scale = 1;
  std::string layout;
  c10::SymInt num_heads = 1;
  std::string group_name, schedule, exchange;
  bool assume_agreed = false;
  double softcap = 0, dropout_p = 0;
  std::vector<c10::SymInt> places;
  // Groups over which the batch entries and the heads of the described call are spread, outermost first: read at run
  // time, so that a traced graph holds no rank.
  std::optional<c10::List<std::string>> batch_groups, head_groups;
};

struct ForwardResult {
  at::Tensor out, max, sum, lse;
  at::Tensor call;  // int64 [2]: the call's number (0 where nothing was agreed), the seed that was used
};

ForwardResult call_attention_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                     const OpArguments& arguments, bool needs_grad);

struct BackwardResult {
  at::Tensor query, key, value;
  at::Tensor sink, bias;  // this rank's part, in the dtype of the input; [0] where there is none or nobody wants it
};

// What the forward gave, and what flows back into it.
struct SavedResults {
  at::Tensor out, lse, call;
  std::optional<at::Tensor> grad_out, grad_lse;
};

BackwardResult call_attention_backward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                       const OpArguments& arguments, const SavedResults& saved, bool wants_bias);

}  // namespace ringspan::binding
