// Peers: what a rank sees of the other ranks by itself, without asking anybody. Nothing here waits.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "binding/base/group.h"

namespace ringspan::binding {

// Where a process runs: what others on the same host need to watch it.
struct Process {
  uint64_t host = 0;  // of the running system and its numbering of processes
  int64_t number = 0, started = 0;

  static Process current();
  bool operator==(const Process&) const = default;
};

// What has become of a rank.
enum class Fate : uint8_t {
  kThere,
  kClosed,  // its connections are closed: it ended, or has left the group
  kEnded,   // its process ended
};

// On gloo a receive from each rank is posted that nobody answers, for the life of the group: it fails when the
// connection does. Of a process on this host the system tells when it ends, also where a child of it keeps its
// connections open. Thread-safe.
class Peers {
 public:
  explicit Peers(const Group& group);
  ~Peers();

  // From now on this rank is watched as a process, if it runs on this host.
  void know(int64_t rank, const Process& process);
  // Whether know() made a difference, or its connections are watched.
  bool is_watched(int64_t rank) const;

  Fate fate(int64_t rank);
  // Those that are not there, in the order in which that was seen.
  std::vector<int64_t> lost();
  // Those that ended a while ago and whose connections are open all the same, so that gloo knows nothing of it.
  std::vector<int64_t> ended_unseen();

  // Closes the connections of gloo, so that whatever is on its way in the group ends with an error, here and there.
  void close();
  // Lets go of all: the group is no more, and its connections are open as long as a receive is.
  void release();
  // Receives and sends that will not be waited for: gloo writes to and reads from their tensors as long as they live.
  void keep(std::vector<c10::intrusive_ptr<c10d::Work>> works);

 private:
  struct Peer {
    c10::intrusive_ptr<c10d::Work> receive;  // null: none is posted
    int process = -1;                        // file descriptor
    bool is_closed = false;
    std::optional<std::chrono::steady_clock::time_point> ended{};

    Fate fate() const { return ended ? Fate::kEnded : is_closed ? Fate::kClosed : Fate::kThere; }
  };
  void look(int64_t rank);

  mutable std::mutex mutex_;
  std::vector<Peer> peers_;
  std::vector<int64_t> lost_;
  std::vector<c10::intrusive_ptr<c10d::Work>> kept_;
};

// In words: "has ended", "has closed its connections ...".
std::string describe(Fate fate);

}  // namespace ringspan::binding
