// The contract of a Transport between processes, and what happens where one of them fails. Every test runs on every
// rank; ranks that a test does not need only make their endpoint.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"
#include "ringspan/transport/mpi/mpi.h"

namespace ringspan {
namespace {

using mpi::Endpoint;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

template <class Values>
auto bytes_of(Values& values) {
  return std::as_writable_bytes(std::span(values));
}

int64_t world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

// The message of the TransportError that `body` throws; empty where it throws none.
template <class Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const TransportError& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Longer than what MPI sends before a receiver asks for it.
constexpr int kLong = 1 << 20;

TEST(Mpi, MovesEachMessageToItsReceiver) {
  Endpoint endpoint(MPI_COMM_WORLD);
  const int world = static_cast<int>(endpoint.world()), rank = static_cast<int>(endpoint.rank());
  for (const int length : {0, 1, 4, kLong}) {
    std::vector<int> sent(length), got(length, -1), want(length);
    std::iota(sent.begin(), sent.end(), rank * 1000);
    std::iota(want.begin(), want.end(), (rank + world - 1) % world * 1000);
    const auto send = endpoint.post_send((rank + 1) % world, 7, bytes_of(sent));
    const auto recv = endpoint.post_recv((rank + world - 1) % world, 7, bytes_of(got));
    endpoint.wait(recv);
    endpoint.wait(send);
    EXPECT_EQ(got, want) << length << " ints";
  }
}

TEST(Mpi, KeepsTheOrderOfOneTagAndSeparatesTags) {
  Endpoint endpoint(MPI_COMM_WORLD);
  const int64_t world = endpoint.world(), next = (endpoint.rank() + 1) % world;
  const int64_t previous = (endpoint.rank() + world - 1) % world;
  for (const bool last_first : {false, true}) {
    std::array<int, 3> sent{1, 2, 3}, got{};
    const auto a = endpoint.post_send(next, 0, bytes_of(sent).subspan(0, 4));
    const auto b = endpoint.post_send(next, 5, bytes_of(sent).subspan(8, 4));
    const auto c = endpoint.post_send(next, 0, bytes_of(sent).subspan(4, 4));
    std::vector<Transport::Request> receives;
    for (const auto& [tag, slot] : {std::pair{5, 2}, std::pair{0, 0}, std::pair{0, 1}}) {
      receives.push_back(endpoint.post_recv(previous, tag, bytes_of(got).subspan(slot * 4, 4)));
    }
    if (last_first) std::swap(receives.front(), receives.back());
    for (const auto request : receives) endpoint.wait(request);
    for (const auto request : {c, a, b}) endpoint.wait(request);
    EXPECT_EQ(got, (std::array<int, 3>{1, 2, 3})) << "last first: " << last_first;
  }
}

// Receives that wait while messages come in: what came between two looks goes to the first, not to the next looked at.
TEST(Mpi, KeepsTheOrderOfOneTagWhileMessagesArrive) {
  Endpoint endpoint(MPI_COMM_WORLD);
  const int64_t world = endpoint.world(), rank = endpoint.rank();
  std::vector<int> sent(64), got(64);
  std::iota(sent.begin(), sent.end(), 0);
  for (int round = 0; round < 100; ++round) {
    std::fill(got.begin(), got.end(), -1);
    std::vector<Transport::Request> requests;
    for (std::size_t i = 0; i < got.size(); ++i) {
      requests.push_back(endpoint.post_recv((rank + world - 1) % world, 0, bytes_of(got).subspan(i * 4, 4)));
    }
    for (std::size_t i = 0; i < sent.size(); ++i) {
      requests.push_back(endpoint.post_send((rank + 1) % world, 0, bytes_of(sent).subspan(i * 4, 4)));
    }
    for (const auto request : requests) endpoint.wait(request);
    ASSERT_EQ(got, sent) << "round " << round;
  }
}

TEST(Mpi, CountsMessagesAndBytesOfTheSender) {
  Endpoint endpoint(MPI_COMM_WORLD);
  std::array<int, 4> sent{}, got{};
  const auto send = endpoint.post_send(endpoint.rank(), 0, bytes_of(sent));
  endpoint.wait(endpoint.post_recv(endpoint.rank(), 0, bytes_of(got)));
  endpoint.wait(send);
  EXPECT_EQ(endpoint.counters().messages_sent, 1);
  EXPECT_EQ(endpoint.counters().bytes_sent, 16);
}

// With blocks of 1000 bytes, what takes over 2 GiB otherwise; RINGSPAN_MPI_BIG=1 sends these (7 GB of memory a rank).
TEST(Mpi, MessagesBeyondTheCountsOfMpi) {
  const bool big = std::getenv("RINGSPAN_MPI_BIG") != nullptr;
  Endpoint endpoint(MPI_COMM_WORLD, big ? mpi::Options{} : mpi::Options{.block_bytes = 1000});
  const int64_t world = endpoint.world(), rank = endpoint.rank();
  std::vector<int64_t> lengths{999, 1000, 1001, 2000, 4'000'003};
  if (big) lengths = {2'200'000'001};
  for (const int64_t length : lengths) {
    const auto pattern = [&](int64_t of) {
      std::vector<uint8_t> bytes(length);
      for (int64_t i = 0; i < length; i += big ? 4093 : 1) bytes[i] = static_cast<uint8_t>(i * 7 + i / 1000 + of);
      return bytes;
    };
    std::vector<uint8_t> sent = pattern(rank), got(length);
    const auto send = endpoint.post_send((rank + 1) % world, 0, bytes_of(sent));
    endpoint.wait(endpoint.post_recv((rank + world - 1) % world, 0, bytes_of(got)));
    endpoint.wait(send);
    EXPECT_TRUE(got == pattern((rank + world - 1) % world)) << length << " bytes";
  }
}

TEST(Mpi, WrongSizeNamesBothSizesAndTheNextMessageIsWhole) {
  Endpoint endpoint(MPI_COMM_WORLD, {.timeout = milliseconds(20000)});
  const int64_t world = endpoint.world(), next = (endpoint.rank() + 1) % world;
  const int64_t previous = (endpoint.rank() + world - 1) % world;
  std::vector<int> sent(kLong, 3), got(kLong);
  for (const auto& [sends, expects] : {std::pair{16, 4}, std::pair{4, 16}, std::pair{0, 4}, std::pair{4 * kLong, 8}}) {
    std::fill(got.begin(), got.end(), 0);
    const auto send = endpoint.post_send(next, 0, bytes_of(sent).first(sends));
    const auto good = endpoint.post_send(next, 0, bytes_of(sent).first(8));
    const std::string error =
        error_of([&, size = expects] { endpoint.wait(endpoint.post_recv(previous, 0, bytes_of(got).first(size))); });
    EXPECT_TRUE(contains(error, concat("expected ", expects, " bytes"))) << error;
    EXPECT_TRUE(contains(error, concat("got ", sends))) << error;
    EXPECT_EQ(got[0], 0) << "a message of another size was written";
    endpoint.wait(endpoint.post_recv(previous, 0, bytes_of(got).first(8)));
    EXPECT_EQ(got[1], 3);
    endpoint.wait(send);
    endpoint.wait(good);
  }
}

TEST(Mpi, StalledPeerEndsTheWaitAndTheOthersHear) {
  if (world_size() < 2) GTEST_SKIP() << "needs a peer";
  const bool waits = world_size() - 1 == Endpoint(MPI_COMM_WORLD).rank();
  const auto begin = Clock::now();
  const std::string error = error_of([&] {
    Endpoint endpoint(MPI_COMM_WORLD, {.timeout = milliseconds(waits ? 50 : 20000)});
    std::array<int, 4> got{};
    if (waits) {
      // Rank 0 never sends.
      endpoint.wait(endpoint.post_recv(0, 0, bytes_of(got)));
    } else {
      endpoint.wait(endpoint.post_recv(endpoint.world() - 1, 0, bytes_of(got)));
    }
  });
  const int64_t last = world_size() - 1;
  EXPECT_EQ(error.empty(), false);
  if (waits) {
    EXPECT_EQ(error, concat("rank ", last, " waited 50 ms for rank 0"));
  } else {
    EXPECT_TRUE(contains(error, "is lost")) << error;
  }
  EXPECT_LT(Clock::now() - begin, milliseconds(10000));
}

TEST(Mpi, ARankThatLeavesWithAnExceptionWakesTheOthers) {
  if (world_size() < 2) GTEST_SKIP() << "needs a peer";
  const auto begin = Clock::now();
  bool left = false;
  const std::string error = error_of([&] {
    try {
      Endpoint endpoint(MPI_COMM_WORLD, {.timeout = milliseconds(20000)});
      if (endpoint.rank() == 1) throw Error("rank 1 gives up");
      std::array<int, 4> got{};
      // Rank 0 waits for rank 1, all others for one that has nothing to do with it.
      endpoint.wait(endpoint.post_recv(endpoint.rank() == 0 ? 1 : 0, 3, bytes_of(got)));
    } catch (const Error&) {
      left = true;
    }
  });
  EXPECT_EQ(left, error.empty());
  EXPECT_TRUE(left || contains(error, "is lost")) << error;
  EXPECT_LT(Clock::now() - begin, milliseconds(10000));
}

TEST(Mpi, ASendToARankThatLeavesEnds) {
  if (world_size() < 2) GTEST_SKIP() << "needs a peer";
  std::vector<int> sent(kLong);
  const std::string error = error_of([&] {
    Endpoint endpoint(MPI_COMM_WORLD, {.timeout = milliseconds(20000)});
    if (endpoint.rank() == 1) {
      endpoint.abandon();
      return;
    }
    endpoint.wait(endpoint.post_send(1, 0, bytes_of(sent)));
  });
  EXPECT_EQ(error.empty(), Endpoint(MPI_COMM_WORLD).rank() == 1) << error;
}

// The receiver comes while the sender still holds its memory, and after it was let go (the sender's time limit).
TEST(Mpi, ACancelledMessageArrivesAsItWasOrNotAtAll) {
  if (world_size() < 2) GTEST_SKIP() << "needs a peer";
  for (const int late_ms : {0, 20, 300}) {
    Endpoint endpoint(MPI_COMM_WORLD, {.timeout = milliseconds(100)});
    std::vector<int> got(kLong, -1);
    if (endpoint.rank() == 0) {
      std::vector<int> sent(kLong, 5);
      endpoint.cancel(endpoint.post_send(1, 0, bytes_of(sent)));
      std::fill(sent.begin(), sent.end(), 6);
    } else if (endpoint.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(late_ms));
      const std::string error = error_of([&] { endpoint.wait(endpoint.post_recv(0, 0, bytes_of(got))); });
      EXPECT_EQ(std::count(got.begin(), got.end(), error.empty() ? 5 : -1), kLong) << late_ms << " ms, " << error;
      EXPECT_TRUE(late_ms < 200 || !error.empty());
    }
  }
}

// A receive that is given up leaves its message to the next one.
TEST(Mpi, CancelOfAReceiveThatNothingHasArrivedFor) {
  Endpoint endpoint(MPI_COMM_WORLD);
  const int64_t world = endpoint.world(), rank = endpoint.rank();
  std::array<int, 1> first{-1}, second{-1}, sent{static_cast<int>(rank)};
  endpoint.cancel(endpoint.post_recv((rank + 1) % world, 9, bytes_of(first)));
  MPI_Barrier(MPI_COMM_WORLD);
  const auto send = endpoint.post_send((rank + world - 1) % world, 9, bytes_of(sent));
  endpoint.wait(endpoint.post_recv((rank + 1) % world, 9, bytes_of(second)));
  endpoint.wait(send);
  EXPECT_EQ(first[0], -1);
  EXPECT_EQ(second[0], static_cast<int>((rank + 1) % world));
}

TEST(Mpi, AMessageThatNobodyTookDoesNotReachTheNextEndpoint) {
  if (world_size() < 2) GTEST_SKIP() << "needs a peer";
  std::array<int, 1> sent{1}, got{0};
  error_of([&] {
    Endpoint endpoint(MPI_COMM_WORLD);
    if (endpoint.rank() == 0) endpoint.wait(endpoint.post_send(1, 0, bytes_of(sent)));
    endpoint.abandon();
  });
  Endpoint endpoint(MPI_COMM_WORLD, {.timeout = milliseconds(20000)});
  sent[0] = 2;
  std::optional<Transport::Request> send;
  if (endpoint.rank() == 0) send = endpoint.post_send(1, 0, bytes_of(sent));
  if (endpoint.rank() == 1) {
    endpoint.wait(endpoint.post_recv(0, 0, bytes_of(got)));
    EXPECT_EQ(got[0], 2);
  }
  if (send) endpoint.wait(*send);
}

TEST(Mpi, WorksOnPartOfTheJob) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
  {
    Endpoint endpoint(half);
    MPI_Comm_free(&half);
    const int64_t world = endpoint.world();
    EXPECT_EQ(world, (world_size() + 1 - rank % 2) / 2);
    std::array<int, 1> sent{rank}, got{-1};
    const auto send = endpoint.post_send(0, 0, bytes_of(sent));
    for (int64_t src = 0; src < world && endpoint.rank() == 0; ++src) {
      endpoint.wait(endpoint.post_recv(src, 0, bytes_of(got)));
      EXPECT_EQ(got[0], rank - 2 * src);
    }
    endpoint.wait(send);
  }
}

TEST(Mpi, RefusesWhatItCannotDo) {
  Endpoint endpoint(MPI_COMM_WORLD);
  const auto message_of = [](const auto& body) -> std::string {
    try {
      body();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  int* bound = nullptr;
  int found = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &bound, &found);
  ASSERT_TRUE(found);
  const int64_t beyond = *bound;
  const std::string tag = message_of([&] { endpoint.post_send(0, beyond, {}); });
  EXPECT_TRUE(contains(tag, concat("tag ", beyond, " is outside 0..", beyond - 1))) << tag;
  EXPECT_NE(message_of([&] { endpoint.post_recv(0, -1, {}); }), "");
  EXPECT_TRUE(contains(message_of([&] { endpoint.post_send(99, 0, {}); }), "peer 99 is outside a world of"));
  EXPECT_NE(message_of([&] { endpoint.wait(12345); }), "");
  EXPECT_TRUE(contains(message_of([] { Endpoint(MPI_COMM_NULL); }), "MPI_COMM_NULL"));
  EXPECT_TRUE(contains(message_of([] { Endpoint(MPI_COMM_WORLD, {.block_bytes = 0}); }), "block_bytes is 0"));
  int argc = 0;
  char** argv = nullptr;
  EXPECT_TRUE(contains(message_of([&] { mpi::Session(argc, argv); }), "initialized already"));
  std::string other_thread;
  std::thread([&] { other_thread = message_of([] { Endpoint(MPI_COMM_WORLD); }); }).join();
  EXPECT_TRUE(contains(other_thread, "MPI_THREAD_SERIALIZED")) << other_thread;
  EXPECT_EQ(endpoint.counters().messages_sent, 0);
}

// In a job of its own (cmake/RingspanTests.cmake): Open MPI cannot make communicators after one that was never met.
TEST(MpiStart, ARankThatMakesNoEndpointEndsTheOthersWait) {
  if (world_size() < 2) GTEST_SKIP() << "needs a peer";
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != 0) {
    const std::string error = error_of([&] { Endpoint(MPI_COMM_WORLD, {.meeting_timeout = milliseconds(50)}); });
    EXPECT_TRUE(contains(error, concat("rank ", rank, " waited 50 ms for all ", world_size(), " ranks"))) << error;
  }
}

}  // namespace
}  // namespace ringspan
