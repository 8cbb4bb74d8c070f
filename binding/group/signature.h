// Signature: what must be the same on every rank of a call, by name. One list gives both the number that each call
// compares and, where ranks differ, the values in words; so whatever differs is shown.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "binding/base/content_hash.h"
#include "binding/base/record.h"

namespace ringspan::binding {

// One argument in words. `note` is told beside the value and is not compared.
struct Field {
  std::string name, value;
  std::string note = {};
};
using Fields = std::vector<Field>;

// A number so that reading it gives the same number.
std::string text_of(double value);
std::string text_of(bool value);
std::string text_of(int64_t value);
std::string text_of(const std::string& value);
std::string text_of(const c10::SymInt& value);
// The first values, of a long list with a hash of all.
std::string text_of(c10::ArrayRef<int64_t> values);
std::string text_of(c10::ArrayRef<double> values);
inline std::string text_of(const std::vector<c10::SymInt>& values) { return text_of(numbers_of(values)); }
template <class T>
std::string text_of(const std::optional<T>& value) {
  return value ? text_of(*value) : "none";
}

class Signature {
 public:
  enum class Form { kHash, kText };

  explicit Signature(Form form) : has_text_(form == Form::kText) { words_.reserve(64); }

  template <class T>
  void add(std::string_view name, const T& value, const std::string& note = "") {
    append(value);
    if (has_text_) fields_.push_back({std::string(name), text_of(value), note});
  }
  // A tensor: whether it is given and its dtype; its values where it is small and lies on the CPU.
  void add_given(std::string_view name, const std::optional<at::Tensor>& tensor);
  void add_content(std::string_view name, const std::optional<at::Tensor>& tensor);
  // Content that was hashed elsewhere; its words come from add_text.
  void add_hash(uint64_t hash) { words_.push_back(static_cast<int64_t>(hash)); }
  void add_text(Field field) {
    if (has_text_) fields_.push_back(std::move(field));
  }

  // The fields of a record that are to be compared.
  template <class Record>
  void add_record(const Record& record) {
    Record::fields(record, [&]<class T>(const FieldInfo& info, const T& field) {
      if (info.compare == Compare::kNever) return;
      if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
        info.compare == Compare::kContent ? add_content(info.name, field) : add_given(info.name, field);
      } else if constexpr (!std::is_same_v<T, at::Tensor> && !std::is_same_v<T, std::vector<at::Tensor>> &&
                           !std::is_same_v<T, std::optional<NameList>>) {
        add(info.name, field);
      }
    });
  }

  bool has_text() const { return has_text_; }
  uint64_t hash() const { return hash_words(words_); }
  Fields take_fields() { return std::move(fields_); }

 private:
  void append(double value) { words_.push_back(std::bit_cast<int64_t>(value)); }
  void append(bool value) { words_.push_back(value); }
  void append(int64_t value) { words_.push_back(value); }
  void append(const c10::SymInt& value) { words_.push_back(number_of(value)); }
  void append(const std::string& value);
  void append(const std::vector<c10::SymInt>& values);
  template <class T>
  void append(const std::optional<T>& value) {
    words_.push_back(value.has_value());
    if (value) append(*value);
  }

  bool has_text_;
  std::vector<int64_t> words_;
  Fields fields_;
};

}  // namespace ringspan::binding
