// Version: what tells apart the versions of this library that the ranks of a group run. It comes first in all that they
// send each other before a call, and keeps its form for ever.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "ringspan/base/error.h"

namespace ringspan::binding {

struct Version {
  // Changes with what the ranks tell each other: the header of a call, and what its hash is made of.
  static constexpr int64_t kProtocol = 3;
  static constexpr uint64_t kMagic = 0x676e697270617073;  // "ringspan" as bytes would read backwards
  static constexpr size_t kTextBytes = 16;

  uint64_t magic = 0;
  int64_t protocol = 0;
  std::array<char, kTextBytes> text{};

  static constexpr Version own() { return {kMagic, kProtocol, {RINGSPAN_VERSION}}; }
  bool operator==(const Version&) const = default;
};

// Error naming both where `theirs`, of rank `other`, is not ours.
inline void check_version(int64_t rank, int64_t other, const Version& theirs) {
  if (theirs == Version::own()) return;
  const std::string text(theirs.text.data(), strnlen(theirs.text.data(), Version::kTextBytes));
  throw Error(concat("rank ", rank, " runs ringspan " RINGSPAN_VERSION " (protocol ", Version::kProtocol, ") and rank ",
                     other,
                     theirs.magic == Version::kMagic ? concat(" ringspan ", text, " (protocol ", theirs.protocol, ")")
                                                     : std::string(" another version or program"),
                     "; install one version on every rank"));
}

}  // namespace ringspan::binding
