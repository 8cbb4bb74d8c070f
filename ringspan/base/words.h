// Words of the command line and of files: lists of numbers, and the names that a wrong one could have been.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ringspan {

// "a:b" at ':' is {"a", "b"}; an empty text is one empty part.
std::vector<std::string> split(std::string_view text, char separator);

// "3,5,8"; an empty text is an empty list. `whole` is what an Error quotes.
std::vector<int64_t> numbers_of(std::string_view text, std::string_view whole);
// The same of each part between '/'.
std::vector<std::vector<int64_t>> lists_of(std::string_view text, std::string_view whole);

std::string joined(const std::vector<std::string>& parts, std::string_view separator);
// "a, b or c"
std::string any_of(const std::vector<std::string>& names);

}  // namespace ringspan
