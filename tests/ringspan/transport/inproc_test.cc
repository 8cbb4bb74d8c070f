#include "ringspan/transport/inproc/inproc.h"

#include <array>
#include <cstring>
#include <thread>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

using std::chrono::milliseconds;

std::span<const std::byte> bytes_of(const std::array<int, 4>& values) { return std::as_bytes(std::span(values)); }
std::span<std::byte> bytes_of(std::array<int, 4>& values) { return std::as_writable_bytes(std::span(values)); }

TEST(Inproc, MovesEachMessageToItsReceiver) {
  std::array<std::array<int, 4>, 3> received{};
  inproc::run_ranks(3, [&](Transport& transport) {
    const int rank = static_cast<int>(transport.rank());
    const std::array<int, 4> sent{rank, rank + 10, rank + 20, rank + 30};
    const auto send = transport.post_send((rank + 1) % 3, 7, bytes_of(sent));
    const auto recv = transport.post_recv((rank + 2) % 3, 7, bytes_of(received[rank]));
    transport.wait(recv);
    transport.wait(send);
  });
  for (int rank = 0; rank < 3; ++rank) {
    const int from = (rank + 2) % 3;
    EXPECT_EQ(received[rank], (std::array<int, 4>{from, from + 10, from + 20, from + 30}));
  }
}

TEST(Inproc, KeepsTheOrderOfOneTagAndSeparatesTags) {
  std::array<std::array<int, 4>, 3> got{};
  inproc::run_ranks(2, [&](Transport& transport) {
    const std::array<int, 4> first{1}, second{2}, other{3};
    if (transport.rank() == 0) {
      const auto a = transport.post_send(1, 0, bytes_of(first));
      const auto b = transport.post_send(1, 5, bytes_of(other));
      const auto c = transport.post_send(1, 0, bytes_of(second));
      for (const auto request : {c, a, b}) transport.wait(request);
    } else {
      for (const auto& [tag, slot] : {std::pair{5, 2}, std::pair{0, 0}, std::pair{0, 1}}) {
        transport.wait(transport.post_recv(0, tag, bytes_of(got[slot])));
      }
    }
  });
  EXPECT_EQ(got[0][0], 1);
  EXPECT_EQ(got[1][0], 2);
  EXPECT_EQ(got[2][0], 3);
}

TEST(Inproc, CountsMessagesAndBytesOfTheSender) {
  inproc::Group group(2);
  const std::array<int, 4> sent{};
  std::array<int, 4> got{};
  const auto send = group.endpoint(0).post_send(1, 0, bytes_of(sent));
  group.endpoint(1).wait(group.endpoint(1).post_recv(0, 0, bytes_of(got)));
  group.endpoint(0).wait(send);
  EXPECT_EQ(group.endpoint(0).counters().messages_sent, 1);
  EXPECT_EQ(group.endpoint(0).counters().bytes_sent, 16);
  EXPECT_EQ(group.endpoint(1).counters().bytes_sent, 0);
}

TEST(Inproc, WrongSizeNamesBothSizes) {
  inproc::Group group(2);
  const std::array<int, 4> sent{};
  std::byte small[4];
  group.endpoint(0).post_send(1, 0, bytes_of(sent));
  const auto recv = group.endpoint(1).post_recv(0, 0, small);
  try {
    group.endpoint(1).wait(recv);
    FAIL() << "a message of another size was taken";
  } catch (const TransportError& error) {
    EXPECT_NE(std::string(error.what()).find("expected 4 bytes"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("got 16"), std::string::npos) << error.what();
  }
}

TEST(Inproc, StalledPeerEndsTheWait) {
  inproc::Group group(2, {.timeout = milliseconds(30)});
  std::array<int, 4> got{};
  const auto recv = group.endpoint(1).post_recv(0, 0, bytes_of(got));
  try {
    group.endpoint(1).wait(recv);
    FAIL() << "the wait ended without a message";
  } catch (const TransportError& error) {
    EXPECT_EQ(error.rank, 1);
    EXPECT_EQ(error.peer, 0);
  }
}

TEST(Inproc, ALostRankWakesTheOthersAndItsOwnErrorIsTheOneReported) {
  EXPECT_THROW(inproc::run_ranks(3,
                                 [](Transport& transport) {
                                   if (transport.rank() == 1) throw Error("rank 1 gave up");
                                   std::array<int, 4> got{};
                                   transport.wait(transport.post_recv(1, 0, bytes_of(got)));
                                 }),
               Error);
}

TEST(Inproc, CancelWithdrawsAMessage) {
  inproc::Group group(2, {.timeout = milliseconds(30)});
  std::array<int, 4> got{};
  {
    const std::array<int, 4> sent{1};
    const auto send = group.endpoint(0).post_send(1, 0, bytes_of(sent));
    group.endpoint(0).cancel(send);
  }
  EXPECT_THROW(group.endpoint(1).wait(group.endpoint(1).post_recv(0, 0, bytes_of(got))), TransportError);
}

TEST(Inproc, RefusesAPeerOutsideTheWorld) {
  inproc::Group group(2);
  EXPECT_THROW(group.endpoint(0).post_send(2, 0, {}), Error);
  EXPECT_THROW(group.endpoint(0).post_recv(-1, 0, {}), Error);
  EXPECT_THROW(inproc::Group(0), Error);
}

}  // namespace
}  // namespace ringspan
