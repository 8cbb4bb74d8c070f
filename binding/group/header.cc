#include "binding/group/header.h"

#include <algorithm>
#include <cstring>

#include "ringspan/base/error.h"

namespace ringspan::binding {

std::string to_text(const Header& header, const std::string& message) {
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + message;
}

Header header_of(const std::string& text) {
  Header header;
  std::memcpy(&header, text.data(), std::min(sizeof header, text.size()));
  return header;
}

std::string message_after_header(const std::string& text) {
  return text.size() > sizeof(Header) ? text.substr(sizeof(Header)) : "";
}

void check_versions(int64_t own_rank, const std::vector<std::string>& texts) {
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const bool is_known = texts[rank].size() >= sizeof(Header);
    check_version(own_rank, static_cast<int64_t>(rank), is_known ? header_of(texts[rank]).version : Version{});
  }
}

RowReading common(RowReading a, RowReading b) {
  return static_cast<RowReading>(static_cast<uint8_t>(a) & static_cast<uint8_t>(b));
}

bool agree_with(Header a, Header b) {
  if (a.seed_is_drawn && b.seed_is_drawn) a.seed = b.seed;
  for (const auto known : {&Header::place, &Header::bias_content, &Header::mask_content}) {
    if (a.*known == 0 || b.*known == 0) a.*known = b.*known;
  }
  for (const auto rows : {&Header::bias_rows, &Header::mask_rows}) {
    if (common(a.*rows, b.*rows) != RowReading::kNone) a.*rows = b.*rows;
  }
  return a == b;
}

void join_known(Header& known, const Header& other) {
  for (const auto field : {&Header::place, &Header::bias_content, &Header::mask_content}) {
    if (known.*field == 0) known.*field = other.*field;
  }
  for (const auto rows : {&Header::bias_rows, &Header::mask_rows}) known.*rows = common(known.*rows, other.*rows);
}

std::string to_words(const Header& header, const std::string& place) {
  const std::string kind = to_words(header.kind, header.forward_number);
  return concat(header.number, " (", kind, place.empty() ? "" : concat(", ", place), ")");
}

}  // namespace ringspan::binding
