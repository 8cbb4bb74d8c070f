#include "ringspan/base/words.h"

#include <charconv>

#include "ringspan/base/error.h"

namespace ringspan {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (true) {
    const size_t end = text.find(separator, begin);
    parts.emplace_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

std::vector<int64_t> numbers_of(std::string_view text, std::string_view whole) {
  std::vector<int64_t> numbers;
  if (text.empty()) return numbers;
  for (const std::string& part : split(text, ',')) {
    int64_t number = 0;
    const auto [end, fault] = std::from_chars(part.data(), part.data() + part.size(), number);
    RINGSPAN_CHECK(fault == std::errc() && end == part.data() + part.size(), "\"", part, "\" in \"", whole,
                   "\" is not a whole number");
    numbers.push_back(number);
  }
  return numbers;
}

std::vector<std::vector<int64_t>> lists_of(std::string_view text, std::string_view whole) {
  std::vector<std::vector<int64_t>> lists;
  for (const std::string& part : split(text, '/')) lists.push_back(numbers_of(part, whole));
  return lists;
}

std::string joined(const std::vector<std::string>& parts, std::string_view separator) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) text += concat(i == 0 ? "" : separator, parts[i]);
  return text;
}

std::string any_of(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i)
    text += concat(i == 0 ? "" : i + 1 == names.size() ? " or " : ", ", names[i]);
  return text;
}

}  // namespace ringspan
