// What a record leaves with autograd's context for the backward, and back: tensors as saved variables, where hooks (an
// activation checkpoint, an offload) see them, all else beside them. A value that is its default is not kept.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "binding/base/record.h"

namespace ringspan::binding {

namespace detail {

template <class T>
constexpr bool kIsTensor = std::is_same_v<T, std::optional<at::Tensor>>;
template <class T>
constexpr bool kIsTensors = std::is_same_v<T, std::vector<at::Tensor>>;

// The fields of a record that holds its defaults, in their order.
template <class Record>
const std::vector<const void*>& default_fields() {
  static const Record record{};
  static const std::vector<const void*> fields = [] {
    std::vector<const void*> found;
    Record::fields(record, [&](const FieldInfo&, const auto& field) { found.push_back(&field); });
    return found;
  }();
  return fields;
}

// Of lists and symbols no default is known.
template <class T>
bool is_default(const FieldInfo& info, const T& field, const T& fallback) {
  if (!info.fallback) return false;
  if constexpr (kIsOptional<T>) {
    return !field;
  } else if constexpr (std::is_same_v<T, c10::SymInt>) {
    return !field.is_symbolic() && field == fallback;
  } else if constexpr (std::is_same_v<T, std::vector<c10::SymInt>>) {
    return false;
  } else {
    return field == fallback;
  }
}

}  // namespace detail

// Appends the record's tensors to `variables`, optional ones in the order of the fields, then those of its list.
template <class Record>
void save_record(const Record& record, torch::autograd::AutogradContext& context,
                 torch::autograd::variable_list& variables) {
  const std::vector<at::Tensor>* list = nullptr;
  auto fallback = detail::default_fields<Record>().begin();
  Record::fields(record, [&]<class T>(const FieldInfo& info, const T& field) {
    const T& of_default = *static_cast<const T*>(*fallback++);
    if constexpr (detail::kIsTensor<T>) {
      variables.push_back(field.value_or(at::Tensor()));
    } else if constexpr (detail::kIsTensors<T>) {
      list = &field;
    } else {
      if (!detail::is_default(info, field, of_default)) context.saved_data[info.name] = Boxed<T>::write(field);
    }
  });
  if (list) variables.insert(variables.end(), list->begin(), list->end());
}

// `first`: the place of the record's first tensor among `variables`.
template <class Record>
Record restore_record(const torch::autograd::AutogradContext& context, const torch::autograd::variable_list& variables,
                      size_t first) {
  Record record{};
  std::vector<at::Tensor>* list = nullptr;
  Record::fields(record, [&]<class T>(const FieldInfo& info, T& field) {
    if constexpr (detail::kIsTensor<T>) {
      const at::Tensor& saved = variables[first++];
      if (saved.defined()) field = saved;
    } else if constexpr (detail::kIsTensors<T>) {
      list = &field;
    } else {
      const auto found = context.saved_data.find(info.name);
      if (found == context.saved_data.end()) return;
      c10::IValue value = found->second;
      field = Boxed<T>::read(value);
    }
  });
  if (list) list->assign(variables.begin() + static_cast<std::ptrdiff_t>(first), variables.end());
  return record;
}

}  // namespace ringspan::binding
