#include "ringspan/base/error.h"

#include <gtest/gtest.h>

namespace ringspan {
namespace {

TEST(ErrorTest, CheckCarriesBothValues) {
  const int64_t rows = 3, expected = 4;
  EXPECT_NO_THROW(RINGSPAN_CHECK(rows == 3, "never seen"));
  try {
    RINGSPAN_CHECK(rows == expected, "rows ", rows, " != ", expected);
    FAIL() << "the check passed";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "rows 3 != 4");
  }
}

TEST(ErrorTest, CheckIsOneStatement) {
  const bool holds = true;
  if (!holds)
    RINGSPAN_CHECK(false, "the branch is not taken");
  else
    SUCCEED();
}

TEST(ErrorTest, UnsupportedIsAnErrorAndALostPeerIsNot) {
  EXPECT_THROW(throw Unsupported("softcap is not offered yet"), Error);
  try {
    throw TransportError(1, 2, 7, "rank 2 is gone");
  } catch (const Error&) {
    FAIL() << "a lost peer is not the caller's mistake";
  } catch (const TransportError& error) {
    EXPECT_EQ(error.rank, 1);
    EXPECT_EQ(error.peer, 2);
    EXPECT_EQ(error.step, 7);
    EXPECT_STREQ(error.what(), "rank 2 is gone");
  }
}

}  // namespace
}  // namespace ringspan
