// mpi: ranks are processes of an MPI job; bytes go from and to the caller's memory. Built where RINGSPAN_MPI is on.
//
// A receive is matched with its message (MPI_Improbe) before MPI is told where to put it, so that a message of another
// size is found whole, with its size, and a receive that is given up has left nothing behind in MPI. What has arrived
// starts to move in every call of the endpoint; MPI itself may move bytes in the background.
//
// Who fails tells the others: abandon(), or the destructor while an exception passes. Their waits then end with a
// TransportError at once instead of at the time limit. Under an MPI that can outlive a dead process (ULFM) its errors
// become TransportError; others, Open MPI 4 and MPICH among them, end the whole job when a process dies.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include <mpi.h>

#include "ringspan/transport/transport.h"

namespace ringspan::mpi {

// MPI_Init_thread and MPI_Finalize for a program that calls neither. It outlives every endpoint; Error where MPI was
// initialized before. MPI_Finalize waits for all ranks of the job: a rank that cannot go on while others are not told
// (they have no endpoint yet, or are stuck) must call MPI_Abort.
class Session {
 public:
  Session(int& argc, char**& argv);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

struct Options {
  std::chrono::milliseconds timeout{60000};          // of one wait, and of one cancel
  std::chrono::milliseconds meeting_timeout{60000};  // of all ranks to come to the constructor; to the destructor
  // Longer messages are described to MPI in blocks of so many bytes, since its counts are int. Ranks may differ in it.
  int64_t block_bytes = int64_t{1} << 30;
};

// One rank of a communicator, which is duplicated, so that no message of the program meets one of ours. One thread at a
// time uses an endpoint: the one that initialized MPI unless MPI was initialized with MPI_THREAD_SERIALIZED or
// MPI_THREAD_MULTIPLE. Kernel threads never call MPI. Tags are 0 ... the MPI_TAG_UB of this MPI - 1; Error beyond.
class Endpoint final : public Transport {
 public:
  // Collective over `comm`. Error where MPI is not initialized, `comm` is no intracommunicator, or this thread may not
  // call MPI; TransportError where not all ranks come within the time limit.
  explicit Endpoint(MPI_Comm comm, Options options = {});
  // Collective where nothing went wrong: waits for the others, up to the time limit. Where something did, the others
  // are told instead, and the communicator is given up rather than freed: a message that is still on its way must not
  // meet a new communicator under the same number. MPI must not be finalized before.
  ~Endpoint() override;
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  int64_t rank() const override { return rank_; }
  int64_t world() const override { return world_; }

  Request post_send(int64_t dst, int64_t tag, std::span<const std::byte> bytes) override;
  Request post_recv(int64_t src, int64_t tag, std::span<std::byte> bytes) override;
  void wait(Request request) override;
  // A message that is being received is waited for. A send cannot be withdrawn from MPI, so the endpoint is abandoned,
  // and this waits until the message has left or its receiver has heard: no rank takes messages of one that has
  // abandoned. Beyond the time limit the receiver is taken to hear before it takes another message, which it does
  // where MPI delivers the notice no later than the message before it.
  void cancel(Request request) noexcept override;

  Counters counters() const override { return counters_; }

  // Tells every rank that this one gives up: waits of all of them, now and later, throw TransportError naming it.
  void abandon() noexcept;

 private:
  struct Pending {
    int64_t peer = 0, tag = 0;
    bool is_send = false;
    bool is_started = false;  // MPI knows of it; a receive: matched with a message of `arrived_bytes`
    MPI_Request request = MPI_REQUEST_NULL;
    std::span<std::byte> target{};  // receives
    int64_t arrived_bytes = 0;
    std::vector<std::byte> scratch{};  // takes a message of another size
  };
  using PendingMap = std::map<Request, Pending>;  // in the order of posting
  using Clock = std::chrono::steady_clock;

  void duplicate(MPI_Comm comm);
  void check_message(int64_t peer, int64_t tag) const;
  void check(int code, const char* call, int64_t peer) const;
  Request remember(Pending pending);
  void progress();
  void hear_notice();
  bool is_first_of_its_kind(PendingMap::const_iterator receive) const;
  void try_to_start(Pending& receive);
  bool is_complete(Pending& pending);
  void finish_receive(Pending& receive) noexcept;
  void give_up_send(Pending& send) noexcept;
  bool leave_together() noexcept;

  const Options options_;
  const int exceptions_;  // in flight when this was made
  MPI_Comm comm_ = MPI_COMM_NULL;
  int64_t rank_ = 0, world_ = 1;
  int notice_tag_ = 0;  // above all tags of messages
  Counters counters_;
  Request next_request_ = 0;
  PendingMap pending_;
  int64_t lost_ = -1;          // the first rank that gave up, this one included
  std::vector<bool> gave_up_;  // by rank
};

}  // namespace ringspan::mpi
