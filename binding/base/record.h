// Records: structs that list their fields once, by name. From the list come the schema of an op, the reading and
// writing of its boxed arguments, what autograd keeps for the backward, and what the ranks of a group compare.
//
//   struct Arguments {
//     double softcap = 0;
//     std::optional<at::Tensor> sink;
//     static void fields(auto& self, auto&& visit) {
//       visit(FieldInfo{"softcap", "0.0", Compare::kValue}, self.softcap);
//       visit(FieldInfo{"sink", "None", Compare::kContent, DtypeRule::kAccumulator}, self.sink);
//     }
//   };
//
// A record may visit the fields of another one in between. Fields are named as callers name their arguments.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/SymInt.h>

namespace ringspan::binding {

// Whether the ranks of a group must give the same.
enum class Compare : uint8_t {
  kNever,    // rank-local, or compared in another form
  kValue,    // numbers and names
  kGiven,    // of a tensor: whether there is one, and its dtype
  kContent,  // of a small tensor: its values too, where it lies on the CPU
};

// Which dtypes a tensor may have (tensor_rules.h).
enum class DtypeRule : uint8_t {
  kAny,          // checked elsewhere
  kAccumulator,  // Float, or the accumulator type of the call
  kWidens,       // one that the accumulator type holds exactly
  kBool,         // Bool
  kHost,         // integers that are read on the CPU, wherever query, key and value lie
};

struct FieldInfo {
  const char* name;
  const char* fallback = nullptr;  // the default as a schema says it; null = the argument is required
  Compare compare = Compare::kNever;
  DtypeRule dtype = DtypeRule::kAny;
};

// Of what is not traced.
inline int64_t number_of(const c10::SymInt& value) { return value.guard_int(__FILE__, __LINE__); }
inline at::IntArrayRef numbers_of(const std::vector<c10::SymInt>& values) {
  return C10_AS_INTARRAYREF_SLOW(c10::SymIntArrayRef(values));
}

// How a type stands in a schema and in an IValue.
template <class T>
struct Boxed;

#define RINGSPAN_BOXED(Type, schema_name, read_value)               \
  template <>                                                       \
  struct Boxed<Type> {                                              \
    static constexpr const char* kType = schema_name;               \
    static Type read(c10::IValue& value) { return read_value; }     \
    static c10::IValue write(const Type& given) { return {given}; } \
  };

using NameList = c10::List<std::string>;

RINGSPAN_BOXED(at::Tensor, "Tensor", std::move(value).toTensor())
RINGSPAN_BOXED(double, "float", value.toDouble())
RINGSPAN_BOXED(bool, "bool", value.toBool())
RINGSPAN_BOXED(int64_t, "int", value.toInt())
RINGSPAN_BOXED(c10::SymInt, "SymInt", value.toSymInt())
RINGSPAN_BOXED(std::string, "str", value.toStringRef())
RINGSPAN_BOXED(std::vector<at::Tensor>, "Tensor[]", value.toTensorVector())
RINGSPAN_BOXED(std::vector<int64_t>, "int[]", value.toIntVector())
RINGSPAN_BOXED(NameList, "str[]", value.to<NameList>())
#undef RINGSPAN_BOXED

template <>
struct Boxed<std::vector<c10::SymInt>> {
  static constexpr const char* kType = "SymInt[]";
  static std::vector<c10::SymInt> read(c10::IValue& value) { return value.toSymIntVector(); }
  static c10::IValue write(const std::vector<c10::SymInt>& given) { return c10::IValue(c10::SymIntArrayRef(given)); }
};

template <class T>
struct Boxed<std::optional<T>> {
  static std::optional<T> read(c10::IValue& value) {
    if (value.isNone()) return std::nullopt;
    // Who has nothing to give may give an undefined tensor.
    if constexpr (std::is_same_v<T, at::Tensor>) {
      if (!value.toTensor().defined()) return std::nullopt;
    }
    return Boxed<T>::read(value);
  }
  static c10::IValue write(const std::optional<T>& given) { return given ? Boxed<T>::write(*given) : c10::IValue(); }
};

template <class T>
constexpr bool kIsOptional = false;
template <class T>
constexpr bool kIsOptional<std::optional<T>> = true;

template <class T>
std::string schema_type() {
  if constexpr (kIsOptional<T>) {
    return std::string(Boxed<typename T::value_type>::kType) + "?";
  } else {
    return Boxed<T>::kType;
  }
}

template <class Record>
size_t num_fields() {
  static const size_t count = [] {
    Record record{};
    size_t fields = 0;
    Record::fields(record, [&](const FieldInfo&, auto&) { ++fields; });
    return fields;
  }();
  return count;
}

// "Tensor query, float softcap=0.0", in the order of the fields.
template <class Record>
std::string schema_of() {
  Record record{};
  std::string text;
  Record::fields(record, [&]<class T>(const FieldInfo& info, T&) {
    text += (text.empty() ? "" : ", ") + schema_type<T>() + " " + info.name;
    if (info.fallback) text += std::string("=") + info.fallback;
  });
  return text;
}

// Takes the record's values off the end of the stack.
template <class Record>
Record pop_record(torch::jit::Stack& stack) {
  Record record{};
  const size_t count = num_fields<Record>();
  auto next = stack.end() - static_cast<std::ptrdiff_t>(count);
  Record::fields(record, [&]<class T>(const FieldInfo&, T& field) { field = Boxed<T>::read(*next++); });
  torch::jit::drop(stack, count);
  return record;
}

template <class Record>
void push_record(const Record& record, torch::jit::Stack& stack) {
  stack.reserve(stack.size() + num_fields<Record>());
  Record::fields(record, [&]<class T>(const FieldInfo&, const T& field) { stack.push_back(Boxed<T>::write(field)); });
}

// Calls visit(info, tensor) for every tensor that a record holds.
template <class Record, class Visit>
void for_each_tensor(const Record& record, Visit&& visit) {
  Record::fields(record, [&]<class T>(const FieldInfo& info, const T& field) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      if (field.defined()) visit(info, field);
    } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
      if (field) visit(info, *field);
    } else if constexpr (std::is_same_v<T, std::vector<at::Tensor>>) {
      for (const at::Tensor& tensor : field) visit(info, tensor);
    }
  });
}

}  // namespace ringspan::binding
