#include "binding/group/signature.h"

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <sstream>

#include <ATen/ATen.h>

#include "ringspan/base/error.h"

namespace ringspan::binding {
namespace {

// Larger ones are not looked at in each call: their values are the caller's word (docs/agreement.md).
constexpr int64_t kMostValues = 4096;

template <class T>
std::string text_of_list(c10::ArrayRef<T> values) {
  constexpr size_t kShown = 12;
  std::string text = "[";
  for (size_t i = 0; i < std::min(values.size(), kShown); ++i) text += concat(i ? " " : "", text_of(values[i]));
  if (values.size() > kShown) {
    std::vector<int64_t> words(values.size());
    std::transform(values.begin(), values.end(), words.begin(), [](T value) { return std::bit_cast<int64_t>(value); });
    text += concat(" ... ", values.size(), " values, hash ", hash_words(words));
  }
  return text + "]";
}

}  // namespace

std::string text_of(double value) {
  std::ostringstream text;
  text << std::setprecision(17) << value;
  // The shortest of the texts that are this number.
  for (int digits = 6; digits < 17; ++digits) {
    std::ostringstream shorter;
    shorter << std::setprecision(digits) << value;
    if (std::stod(shorter.str()) == value) return shorter.str();
  }
  return text.str();
}

std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(int64_t value) { return concat(value); }
std::string text_of(const std::string& value) { return value; }
std::string text_of(const c10::SymInt& value) { return concat(value); }
std::string text_of(c10::ArrayRef<int64_t> values) { return text_of_list(values); }
std::string text_of(c10::ArrayRef<double> values) { return text_of_list(values); }

void Signature::append(const std::string& value) { words_.push_back(static_cast<int64_t>(hash_text(value))); }

void Signature::append(const std::vector<c10::SymInt>& values) {
  words_.push_back(static_cast<int64_t>(values.size()));
  for (const c10::SymInt& value : values) append(value);
}

void Signature::add_given(std::string_view name, const std::optional<at::Tensor>& tensor) {
  words_.push_back(tensor ? static_cast<int64_t>(tensor->scalar_type()) : -1);
  if (has_text_) fields_.push_back({std::string(name), tensor ? toString(tensor->scalar_type()) : "none"});
}

void Signature::add_content(std::string_view name, const std::optional<at::Tensor>& tensor) {
  if (!tensor || !tensor->device().is_cpu() || tensor->numel() > kMostValues) {
    add_given(name, tensor);
    return;
  }
  words_.push_back(static_cast<int64_t>(tensor->scalar_type()));
  words_.push_back(tensor->dim());
  for (const int64_t size : tensor->sizes()) words_.push_back(size);
  const bool is_float = tensor->is_floating_point();
  const at::Tensor wide = tensor->to(is_float ? at::kDouble : at::kLong).contiguous();
  const auto count = static_cast<size_t>(wide.numel());
  const size_t begin = words_.size();
  words_.resize(begin + count);
  if (count > 0) std::memcpy(words_.data() + begin, wide.const_data_ptr(), count * sizeof(int64_t));
  if (!has_text_) return;
  const std::string values = is_float ? text_of(c10::ArrayRef<double>(wide.const_data_ptr<double>(), count))
                                      : text_of(c10::ArrayRef<int64_t>(wide.const_data_ptr<int64_t>(), count));
  fields_.push_back({std::string(name), concat(toString(tensor->scalar_type()), " ", tensor->sizes(), " ", values)});
}

}  // namespace ringspan::binding
