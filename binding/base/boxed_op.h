// Ops whose arguments are records (record.h), in the one form in which all of them are registered.
#pragma once

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "binding/base/record.h"

namespace ringspan::binding {

template <class... Results>
void push_results(torch::jit::Stack& stack, std::tuple<Results...>&& results) {
  std::apply([&](auto&... result) { (stack.emplace_back(std::move(result)), ...); }, results);
}
template <class Result>
void push_results(torch::jit::Stack& stack, Result&& result) {
  stack.emplace_back(std::forward<Result>(result));
}

// The kernel of an op over a function of a record, which returns the op's results as a tuple, or the only one.
template <class Record, auto kFunction>
void boxed_kernel(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Record record = pop_record<Record>(*stack);
  push_results(*stack, kFunction(record));
}

template <class Record, auto kFunction>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<&boxed_kernel<Record, kFunction>>();
}

// "name(Tensor query, ...) -> (results)"
template <class Record>
std::string boxed_schema(const std::string& name, const std::string& results) {
  return name + "(" + schema_of<Record>() + ") -> " + results;
}

// Calls an op through the dispatcher; its results are what is left on the stack.
template <class Record>
torch::jit::Stack call_boxed(const c10::OperatorHandle& op, const Record& record) {
  torch::jit::Stack stack;
  push_record(record, stack);
  op.callBoxed(stack);
  return stack;
}

}  // namespace ringspan::binding
