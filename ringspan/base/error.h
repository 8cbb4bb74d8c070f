// Two kinds of failure, and nothing else leaves the core (docs/errors.md):
//   Error           the caller's mistake: a bad size, a mask that does not fit, a request that is not offered.
//                   Thrown before anything is sent; the message carries both values and what to do.
//   TransportError  a peer was lost or stalled; the transport must be rebuilt.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace ringspan {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What the library refuses by design or does not offer yet (NotImplementedError in Python).
class Unsupported : public Error {
 public:
  using Error::Error;
};

class TransportError : public std::runtime_error {
 public:
  TransportError(int64_t rank, int64_t peer, int64_t step, const std::string& what)
      : std::runtime_error(what), rank(rank), peer(peer), step(step) {}

  int64_t rank;  // who noticed
  int64_t peer;  // who is missing
  int64_t step;  // of the plan; -1 outside a plan
};

// concat("rows ", 3, " != ", 4) == "rows 3 != 4"
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace ringspan

// Throws ringspan::Error with the concatenated message unless `condition` holds.
#define RINGSPAN_CHECK(condition, ...)                                          \
  do {                                                                          \
    if (!(condition)) throw ::ringspan::Error(::ringspan::concat(__VA_ARGS__)); \
  } while (false)
