// The PyTorch operators from C++, without Python: loads the library of the Python package, which needs no Python, and
// calls torch.ops.ringspan.attention through the dispatcher, forward and backward. Compared with PyTorch's own
// attention.
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/autograd.h>

namespace {

// Calls an operator with some arguments by name and the others' defaults; returns its first result.
at::Tensor call(const char* name, const std::map<std::string, c10::IValue>& given) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto found = given.find(argument.name());
    stack.push_back(found != given.end() ? found->second : argument.default_value().value());
  }
  op.callBoxed(stack);
  return stack.front().toTensor();
}

float difference(const at::Tensor& got, const at::Tensor& want) { return (got - want).abs().max().item<float>(); }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || !dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {
    std::fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "usage: torch_example PATH/TO/ringspan/_C.so");
    return 2;
  }
  const int64_t tokens = 1000;
  const auto leaf = [](at::Tensor tensor) { return tensor.requires_grad_(); };
  at::manual_seed(0);
  const at::Tensor q = leaf(at::randn({1, 8, tokens, 64})), dout = at::randn({1, 8, tokens, 64});
  const at::Tensor k = leaf(at::randn({1, 2, tokens, 64})), v = leaf(at::randn({1, 2, tokens, 64}));

  // Version, world, batch, q_len, kv_len, two contiguous maps, causal from the top left
  // (docs/decisions/call-description.md).
  const std::vector<int64_t> spec{1, 1, 1, tokens, tokens, 0, 0, 0, 0, 1, 1};
  const at::Tensor out = call("ringspan::attention", {{"query", q},
                                                      {"key", k},
                                                      {"value", v},
                                                      {"spec", spec},
                                                      {"tables", std::vector<at::Tensor>{}},
                                                      {"scale", 0.125},
                                                      {"layout", "BNSD"},
                                                      {"num_heads", 8},
                                                      {"group_name", ""}});  // this process alone
  const auto got = torch::autograd::grad({out}, {q, k, v}, {dout});

  const at::Tensor expected = at::scaled_dot_product_attention(q, k, v, {}, 0, /*is_causal=*/true, 0.125,
                                                               /*enable_gqa=*/true);
  const auto want = torch::autograd::grad({expected}, {q, k, v}, {dout});
  float most = difference(out, expected);
  for (size_t i = 0; i < want.size(); ++i) most = std::max(most, difference(got[i], want[i]));
  std::printf("out, dq, dk, dv: %s PyTorch's attention\n", most < 1e-4f ? "equal to" : "DIFFER from");
  return most < 1e-4f ? 0 : 1;
}
