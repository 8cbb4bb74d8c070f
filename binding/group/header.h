// Header: what a rank publishes before a call, and what it publishes in its place where it makes none.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "binding/group/proposal.h"
#include "binding/watch/version.h"

namespace ringspan::binding {

enum class RefusalKind : int64_t { kNone, kBadArgument, kUnsupported, kGaveUp, kFailed };

// Fixed size; a refusal's message follows it, else the place of the call. What tells versions apart comes first.
struct Header {
  Version version = Version::own();

  int64_t number = 0;
  RefusalKind refusal = RefusalKind::kNone;
  CallKind kind = CallKind::kForward;
  int64_t forward_number = 0;
  uint64_t hash = 0;
  // Where calls are debugged; 0 unknown.
  uint64_t place = 0, bias_content = 0, mask_content = 0;
  int64_t seed = 0;
  bool seed_is_drawn = false, needs_grad = false, is_debugged = false;
  RowReading bias_rows = RowReading::kNone, mask_rows = RowReading::kNone;
  std::array<char, 3> unused{};

  bool operator==(const Header&) const = default;
};
// With its length it fits into the one frame of a group without a store (mailbox.cc).
static_assert(sizeof(Header) <= 120 && std::has_unique_object_representations_v<Header>);

std::string to_text(const Header& header, const std::string& message = "");
// Of what is shorter the beginning.
Header header_of(const std::string& text);
// What follows the header.
std::string message_after_header(const std::string& text);

// Error where a rank runs another version: before anything else in a header is believed.
void check_versions(int64_t own_rank, const std::vector<std::string>& texts);

// What the readings of all ranks have in common; kNone where none is left.
RowReading common(RowReading a, RowReading b);
// Whether the two ranks may go on together.
bool agree_with(Header a, Header b);
// Takes over what `other` knows and `known` does not.
void join_known(Header& known, const Header& other);

// "3 (backward of call 2, train:step+4)"
std::string to_words(const Header& header, const std::string& place);

}  // namespace ringspan::binding
