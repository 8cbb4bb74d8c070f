// Collectives of c10d by the names of their ops: the methods of ProcessGroup change between versions of PyTorch.
#pragma once

#include <string>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/custom_class.h>

namespace ringspan::binding {

// Posts "c10d::<name>" on a group with a backend object. The arguments are those of the schema up to `async_op`.
inline c10::intrusive_ptr<c10d::Work> post_c10d(const char* name, torch::jit::Stack arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("c10d::") + name).c_str(), "");
  constexpr bool kAsync = true;
  constexpr int64_t kTimeoutOfGroup = -1;
  arguments.emplace_back(kAsync);
  arguments.emplace_back(kTimeoutOfGroup);
  op.callBoxed(arguments);
  return std::move(arguments.back()).toCustomClass<c10d::Work>();
}

}  // namespace ringspan::binding
