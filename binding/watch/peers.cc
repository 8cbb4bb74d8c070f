#include "binding/watch/peers.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <fstream>
#include <limits>
#include <sstream>
#include <utility>

#include <ATen/ATen.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "binding/base/content_hash.h"

namespace ringspan::binding {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// No message of a call has this tag (exchange.cc).
constexpr int kTag = std::numeric_limits<int>::max();
// With more ranks the receives would cost more than they tell.
constexpr int64_t kMostRanks = 64;
// A connection is closed by the system within this time after its process has ended, unless another one holds it too.
constexpr Clock::duration kUnseen = 1s;

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// In clock ticks since the system started; 0 where it cannot be told. Numbers are given again, but not with this beside
// them.
int64_t start_of(int64_t process) {
  const std::string text = read_file("/proc/" + std::to_string(process) + "/stat");
  // The name in brackets may hold anything; the 20th field after it.
  const size_t bracket = text.rfind(')');
  if (bracket == std::string::npos) return 0;
  std::istringstream fields(text.substr(bracket + 1));
  std::string field;
  for (int i = 0; i < 19; ++i) fields >> field;
  int64_t started = 0;
  fields >> started;
  return started;
}

}  // namespace

Process Process::current() {
  struct stat numbering{};
  const bool has_numbering = ::stat("/proc/self/ns/pid", &numbering) == 0;
  const std::string host = read_file("/proc/sys/kernel/random/boot_id");
  Process process{.number = ::getpid(), .started = start_of(::getpid())};
  if (has_numbering && !host.empty()) process.host = hash_text(host) ^ mix(static_cast<uint64_t>(numbering.st_ino));
  return process;
}

Peers::Peers(const Group& group) : peers_(static_cast<size_t>(group.size)) {
  if (group.backend_name != "gloo" || group.size > kMostRanks) return;
  for (int64_t rank = 0; rank < group.size; ++rank) {
    if (rank == group.rank) continue;
    try {
      std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
      peers_[rank].receive = group.backend->recv(nothing, static_cast<int>(rank), kTag);
    } catch (const std::exception&) {
      peers_[rank].is_closed = true;
      lost_.push_back(rank);
    }
  }
}

Peers::~Peers() { release(); }

void Peers::release() {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;  // freed without the lock: it takes gloo's time
  const std::lock_guard lock(mutex_);
  for (Peer& peer : peers_) {
    works.push_back(std::exchange(peer.receive, nullptr));
    if (peer.process >= 0) ::close(std::exchange(peer.process, -1));
  }
  std::move(kept_.begin(), kept_.end(), std::back_inserter(works));
  kept_.clear();
}

void Peers::know(int64_t rank, const Process& process) {
  const Process own = Process::current();
  const bool is_near = process.host != 0 && process.host == own.host && process.started != 0 && process != own;
  if (!is_near) return;
#ifdef SYS_pidfd_open
  const int descriptor = static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(process.number), 0));
  const int error = errno;
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[rank];
  if (descriptor >= 0 && start_of(process.number) == process.started) {
    peer.process = descriptor;
    return;
  }
  if (descriptor >= 0) ::close(descriptor);
  // The number is free, or another process has it by now. A system without the call says nothing.
  if ((descriptor >= 0 || error == ESRCH) && !peer.ended) {
    if (peer.fate() == Fate::kThere) lost_.push_back(rank);
    peer.ended = Clock::now();
  }
#endif
}

bool Peers::is_watched(int64_t rank) const {
  const std::lock_guard lock(mutex_);
  return peers_[rank].receive || peers_[rank].process >= 0;
}

void Peers::look(int64_t rank) {
  Peer& peer = peers_[rank];
  const Fate before = peer.fate();
  if (peer.process >= 0 && !peer.ended) {
    pollfd descriptor{peer.process, POLLIN, 0};
    if (::poll(&descriptor, 1, 0) > 0) peer.ended = Clock::now();
  }
  if (peer.receive && !peer.is_closed) {
    try {
      // A wait that is told to stop before it begins only looks: false while nothing came, and it throws where the
      // connection failed.
      peer.receive->abort();
      peer.receive->wait(1h);
    } catch (const std::exception&) {
      peer.is_closed = true;
    }
  }
  if (before == Fate::kThere && peer.fate() != Fate::kThere) lost_.push_back(rank);
}

Fate Peers::fate(int64_t rank) {
  const std::lock_guard lock(mutex_);
  look(rank);
  return peers_[rank].fate();
}

std::vector<int64_t> Peers::lost() {
  const std::lock_guard lock(mutex_);
  for (size_t rank = 0; rank < peers_.size(); ++rank) look(static_cast<int64_t>(rank));
  return lost_;
}

std::vector<int64_t> Peers::ended_unseen() {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> ranks;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    look(static_cast<int64_t>(rank));
    const Peer& peer = peers_[rank];
    if (peer.receive && !peer.is_closed && peer.ended && Clock::now() - *peer.ended > kUnseen) {
      ranks.push_back(static_cast<int64_t>(rank));
    }
  }
  return ranks;
}

void Peers::close() {
  const std::lock_guard lock(mutex_);
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    look(static_cast<int64_t>(rank));
    const Peer& peer = peers_[rank];
    if (!peer.receive || peer.is_closed) continue;
    try {
      // gloo closes the connections to all ranks where a wait for a receive expires: here it is wanted.
      peer.receive->wait(1ms);
    } catch (const std::exception&) {
      break;
    }
  }
  // What closed by our own hand says nothing about the others.
  for (Peer& peer : peers_) peer.receive.reset();
}

void Peers::keep(std::vector<c10::intrusive_ptr<c10d::Work>> works) {
  const std::lock_guard lock(mutex_);
  std::move(works.begin(), works.end(), std::back_inserter(kept_));
}

std::string describe(Fate fate) {
  switch (fate) {
    case Fate::kEnded: return "has ended";
    case Fate::kClosed: return "has closed its connections: it ended, or has left the group";
    case Fate::kThere: break;
  }
  return "is there";
}

}  // namespace ringspan::binding
