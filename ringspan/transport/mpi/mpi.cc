#include "ringspan/transport/mpi/mpi.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "ringspan/base/error.h"

namespace ringspan::mpi {
namespace {

// Two passes of Open MPI 4.1's progress, each of up to 31 short messages of one node, and two to spare.
constexpr int kLooks = 4;

std::string text_of(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return concat("MPI error ", code);
  return {text, static_cast<std::size_t>(length)};
}

// `bytes` bytes as a count of an MPI type.
class Extent {
 public:
  Extent(int64_t bytes, int64_t block_bytes) {
    if (bytes <= block_bytes) {
      count_ = static_cast<int>(bytes);
      return;
    }
    MPI_Datatype block = MPI_DATATYPE_NULL;
    MPI_Type_contiguous(static_cast<int>(block_bytes), MPI_BYTE, &block);
    const int lengths[2] = {static_cast<int>(bytes / block_bytes), static_cast<int>(bytes % block_bytes)};
    const MPI_Aint offsets[2] = {0, static_cast<MPI_Aint>(bytes - bytes % block_bytes)};
    const MPI_Datatype types[2] = {block, MPI_BYTE};
    MPI_Type_create_struct(2, lengths, offsets, types, &type_);
    MPI_Type_commit(&type_);
    MPI_Type_free(&block);
    count_ = 1;
  }
  ~Extent() {
    // What is posted with it keeps it alive.
    if (type_ != MPI_BYTE) MPI_Type_free(&type_);
  }
  Extent(const Extent&) = delete;
  Extent& operator=(const Extent&) = delete;

  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_ = 0;
  MPI_Datatype type_ = MPI_BYTE;
};

bool is_running() {
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

void check_thread() {
  int level = MPI_THREAD_SINGLE, is_main = 0;
  MPI_Query_thread(&level);
  MPI_Is_thread_main(&is_main);
  RINGSPAN_CHECK(level >= MPI_THREAD_SERIALIZED || is_main,
                 "this is not the thread that initialized MPI, whose thread level is ", level,
                 "; threads other than that one need MPI_THREAD_SERIALIZED, level ", MPI_THREAD_SERIALIZED);
}

}  // namespace

Session::Session(int& argc, char**& argv) {
  int initialized = 0;
  MPI_Initialized(&initialized);
  RINGSPAN_CHECK(!initialized, "MPI is initialized already; make an Endpoint without a Session");
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
}

Session::~Session() {
  if (is_running()) MPI_Finalize();
}

Endpoint::Endpoint(MPI_Comm comm, Options options) : options_(options), exceptions_(std::uncaught_exceptions()) {
  RINGSPAN_CHECK(is_running(),
                 "MPI is not running; call MPI_Init_thread, or hold a ringspan::mpi::Session, around every Endpoint");
  check_thread();
  RINGSPAN_CHECK(comm != MPI_COMM_NULL, "the communicator is MPI_COMM_NULL");
  RINGSPAN_CHECK(options.block_bytes > 0 && options.block_bytes <= std::numeric_limits<int>::max(), "block_bytes is ",
                 options.block_bytes, "; it must be in 1..", std::numeric_limits<int>::max());
  int is_inter = 0;
  MPI_Comm_test_inter(comm, &is_inter);
  RINGSPAN_CHECK(!is_inter, "the communicator has two groups of ranks; an Endpoint needs an intracommunicator");
  int rank = 0, world = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &world);
  rank_ = rank;
  world_ = world;
  gave_up_.resize(static_cast<std::size_t>(world));
  void* bound = nullptr;
  int found = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&bound), &found);
  notice_tag_ = found ? *static_cast<int*>(bound) : 32767;  // what the standard promises
  duplicate(comm);
}

void Endpoint::duplicate(MPI_Comm comm) {
  // On the heap: where ranks are missing, MPI may still write it after this object is gone.
  auto copy = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Comm_idup(comm, copy.get(), &request), "MPI_Comm_idup", -1);
  const Clock::time_point deadline = Clock::now() + options_.meeting_timeout;
  for (int done = 0;;) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Comm_idup", -1);
    if (done) break;
    if (Clock::now() > deadline) {
      copy.release();
      throw TransportError(rank_, -1, -1,
                           concat("rank ", rank_, " waited ", options_.meeting_timeout.count(), " ms for all ", world_,
                                  " ranks of the communicator to make their Endpoint"));
    }
    std::this_thread::yield();
  }
  comm_ = *copy;
  check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler", -1);
}

Endpoint::~Endpoint() {
  if (!is_running()) return;
  if (!pending_.empty() || std::uncaught_exceptions() > exceptions_) abandon();
  while (!pending_.empty()) cancel(pending_.begin()->first);
  if (lost_ < 0 && leave_together()) MPI_Comm_free(&comm_);
}

void Endpoint::check_message(int64_t peer, int64_t tag) const {
  RINGSPAN_CHECK(peer >= 0 && peer < world_, "peer ", peer, " is outside a world of ", world_);
  RINGSPAN_CHECK(tag >= 0 && tag < notice_tag_, "tag ", tag, " is outside 0..", notice_tag_ - 1,
                 ", the tags that this MPI offers");
}

void Endpoint::check(int code, const char* call, int64_t peer) const {
  if (code != MPI_SUCCESS)
    throw TransportError(rank_, peer, -1, concat("rank ", rank_, ": ", call, ": ", text_of(code)));
}

Transport::Request Endpoint::remember(Pending pending) {
  pending_.emplace(next_request_, std::move(pending));
  return next_request_++;
}

Transport::Request Endpoint::post_send(int64_t dst, int64_t tag, std::span<const std::byte> bytes) {
  check_message(dst, tag);
  Pending pending{.peer = dst, .tag = tag, .is_send = true};
  progress();
  if (lost_ < 0) {
    const Extent extent(static_cast<int64_t>(bytes.size()), options_.block_bytes);
    check(MPI_Isend(bytes.data(), extent.count(), extent.type(), static_cast<int>(dst), static_cast<int>(tag), comm_,
                    &pending.request),
          "MPI_Isend", dst);
    pending.is_started = true;
    counters_.messages_sent += 1;
    counters_.bytes_sent += static_cast<int64_t>(bytes.size());
  }
  return remember(std::move(pending));
}

Transport::Request Endpoint::post_recv(int64_t src, int64_t tag, std::span<std::byte> bytes) {
  check_message(src, tag);
  const Request request = remember({.peer = src, .tag = tag, .target = bytes});
  progress();
  return request;
}

void Endpoint::progress() {
  hear_notice();
  for (auto entry = pending_.begin(); entry != pending_.end() && lost_ < 0; ++entry) {
    Pending& pending = entry->second;
    if (!pending.is_send && !pending.is_started && is_first_of_its_kind(entry)) try_to_start(pending);
  }
}

void Endpoint::hear_notice() {
  int found = 0;
  MPI_Status status;
  check(MPI_Iprobe(MPI_ANY_SOURCE, notice_tag_, comm_, &found, &status), "MPI_Iprobe", -1);
  if (!found) return;
  const int src = status.MPI_SOURCE;
  check(MPI_Recv(nullptr, 0, MPI_BYTE, src, notice_tag_, comm_, MPI_STATUS_IGNORE), "MPI_Recv", src);
  gave_up_[static_cast<std::size_t>(src)] = true;
  if (lost_ < 0) lost_ = src;
}

// Messages of one source and tag go to receives in the order of posting, whichever is waited for first.
bool Endpoint::is_first_of_its_kind(PendingMap::const_iterator receive) const {
  return std::none_of(pending_.begin(), receive, [&](const PendingMap::value_type& entry) {
    const Pending& earlier = entry.second;
    return !earlier.is_send && !earlier.is_started && earlier.peer == receive->second.peer &&
           earlier.tag == receive->second.tag;
  });
}

void Endpoint::try_to_start(Pending& receive) {
  const int src = static_cast<int>(receive.peer);
  int found = 0;
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  check(MPI_Improbe(src, static_cast<int>(receive.tag), comm_, &found, &message, &status), "MPI_Improbe", src);
  if (!found) return;
  // Its sender may have told since that it gave up and that its memory is gone. What MPI looks through is what had come
  // in by the call before, hence more than once.
  for (int i = 0; i < kLooks && lost_ < 0; ++i) hear_notice();
  if (lost_ >= 0) return;
  MPI_Count arrived = 0;
  check(MPI_Get_elements_x(&status, MPI_BYTE, &arrived), "MPI_Get_elements_x", src);
  receive.arrived_bytes = static_cast<int64_t>(arrived);
  std::byte* data = receive.target.data();
  if (receive.arrived_bytes != static_cast<int64_t>(receive.target.size())) {
    receive.scratch.resize(static_cast<std::size_t>(arrived));
    data = receive.scratch.data();
  }
  const Extent extent(receive.arrived_bytes, options_.block_bytes);
  check(MPI_Imrecv(data, extent.count(), extent.type(), &message, &receive.request), "MPI_Imrecv", src);
  receive.is_started = true;
}

bool Endpoint::is_complete(Pending& pending) {
  progress();
  if (!pending.is_started) return false;
  int done = 0;
  check(MPI_Test(&pending.request, &done, MPI_STATUS_IGNORE), "MPI_Test", pending.peer);
  return done != 0;
}

void Endpoint::wait(Request request) {
  const auto entry = pending_.find(request);
  RINGSPAN_CHECK(entry != pending_.end(), "request ", request, " is not pending on rank ", rank_);
  Pending& pending = entry->second;
  const Clock::time_point deadline = Clock::now() + options_.timeout;
  while (!is_complete(pending)) {
    if (lost_ >= 0 && (pending.is_send || !pending.is_started)) {
      throw TransportError(rank_, lost_, -1, concat("rank ", rank_, ": rank ", lost_, " is lost"));
    }
    if (Clock::now() > deadline) {
      throw TransportError(rank_, pending.peer, -1,
                           concat("rank ", rank_, " waited ", options_.timeout.count(), " ms for rank ", pending.peer));
    }
    std::this_thread::yield();
  }
  const Pending done = std::move(pending);
  pending_.erase(entry);
  if (!done.is_send && done.arrived_bytes != static_cast<int64_t>(done.target.size())) {
    throw TransportError(rank_, done.peer, -1,
                         concat("rank ", rank_, " expected ", done.target.size(), " bytes from rank ", done.peer,
                                ", got ", done.arrived_bytes));
  }
}

void Endpoint::cancel(Request request) noexcept {
  const auto entry = pending_.find(request);
  if (entry == pending_.end()) return;
  Pending& pending = entry->second;
  if (pending.is_started) pending.is_send ? give_up_send(pending) : finish_receive(pending);
  pending_.erase(entry);
}

// No time limit: until it is complete MPI may write the caller's memory.
void Endpoint::finish_receive(Pending& receive) noexcept {
  for (int done = 0; !done;) {
    if (MPI_Test(&receive.request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
    if (!done) std::this_thread::yield();
  }
}

void Endpoint::give_up_send(Pending& send) noexcept {
  const Clock::time_point deadline = Clock::now() + options_.timeout;
  for (int done = 0;;) {
    if (MPI_Test(&send.request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done) return;
    abandon();
    try {
      hear_notice();
    } catch (const TransportError&) {
      break;
    }
    // A rank that has given up too takes no more messages, and has finished those that it took. One that computes past
    // the time limit hears of this before it takes another.
    if (gave_up_[static_cast<std::size_t>(send.peer)] || Clock::now() > deadline) break;
    std::this_thread::yield();
  }
  MPI_Request_free(&send.request);
}

void Endpoint::abandon() noexcept {
  const auto self = static_cast<std::size_t>(rank_);
  if (gave_up_[self]) return;
  gave_up_[self] = true;
  if (lost_ < 0) lost_ = rank_;
  for (auto& [request, pending] : pending_) {
    if (!pending.is_send && pending.is_started) finish_receive(pending);
  }
  for (int peer = 0; peer < static_cast<int>(world_); ++peer) {
    if (peer == static_cast<int>(rank_)) continue;
    MPI_Request notice = MPI_REQUEST_NULL;
    if (MPI_Isend(nullptr, 0, MPI_BYTE, peer, notice_tag_, comm_, &notice) == MPI_SUCCESS) MPI_Request_free(&notice);
  }
}

// True where every rank leaves without a failure: nothing of this communicator is on its way then.
bool Endpoint::leave_together() noexcept {
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(comm_, &request) != MPI_SUCCESS) return false;
  const Clock::time_point deadline = Clock::now() + options_.meeting_timeout;
  for (int done = 0;;) {
    if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
    if (done) return true;
    try {
      hear_notice();
    } catch (const TransportError&) {
      return false;
    }
    if (lost_ >= 0 || Clock::now() > deadline) return false;
    std::this_thread::yield();
  }
}

}  // namespace ringspan::mpi
