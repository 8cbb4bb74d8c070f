// Transport: moves bytes between ranks and knows nothing of attention. Messages of one (source, destination, tag)
// arrive in the order of posting. Posting never blocks; memory that is posted stays untouched until wait() returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ringspan {

class Transport {
 public:
  using Request = int64_t;

  virtual ~Transport() = default;

  virtual int64_t rank() const = 0;
  virtual int64_t world() const = 0;

  virtual Request post_send(int64_t dst, int64_t tag, std::span<const std::byte> bytes) = 0;
  // The message must have exactly this size; TransportError naming both sizes from wait() if not.
  virtual Request post_recv(int64_t src, int64_t tag, std::span<std::byte> bytes) = 0;
  // Each request is waited for once. TransportError where the peer is lost or the time limit has passed.
  virtual void wait(Request request) = 0;
  // Gives a request up (after a failure): on return its memory is no longer read or written.
  virtual void cancel(Request request) noexcept = 0;

  struct Counters {
    int64_t messages_sent = 0, bytes_sent = 0;
  };
  virtual Counters counters() const = 0;  // of this rank, since construction
};

}  // namespace ringspan
