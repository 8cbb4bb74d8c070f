// inproc: ranks are threads of one process; one copy per message, made by the receiver straight from the sender's
// memory. The default of the command line and of the tests.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "ringspan/transport/transport.h"

namespace ringspan::inproc {

struct Options {
  std::chrono::milliseconds timeout{60000};  // of one wait
};

// The meeting place of `world` ranks. endpoint(r) may be used by one thread at a time.
class Group {
 public:
  explicit Group(int64_t world, Options options = {});
  ~Group();

  Transport& endpoint(int64_t rank);
  // Wakes everybody who waits; their waits, now and later, throw TransportError naming `rank` as the lost peer.
  void abandon(int64_t rank);

 private:
  class Hub;
  class Endpoint;
  std::shared_ptr<Hub> hub_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
};

// Runs body(transport) on `world` threads and joins them. The first exception that is not the echo of another rank's
// failure is rethrown.
void run_ranks(int64_t world, const std::function<void(Transport&)>& body, Options options = {});

}  // namespace ringspan::inproc
