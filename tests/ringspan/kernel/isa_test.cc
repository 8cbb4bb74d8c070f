#include "ringspan/kernel/isa.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

constexpr Isa kAllIsas[] = {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16};

// What a new process with RINGSPAN_ISA = `value` answers: a child runs the test below with the variable set, silently.
// Nothing but system calls between fork() and exec(), so that threads of other tests don't matter.
int exit_status_with(const std::string& value, const std::string& expected) {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  if (length <= 0) return -1;
  path[length] = '\0';
  std::string variable = "RINGSPAN_ISA=" + value, expectation = "RINGSPAN_TEST_EXPECTED_ISA=" + expected;
  std::string filter = "--gtest_filter=IsaChildTest.*", quiet = "--gtest_brief=1";
  char* const arguments[] = {path, filter.data(), quiet.data(), nullptr};
  char* const environment[] = {variable.data(), expectation.data(), nullptr};
  const pid_t child = fork();
  if (child == 0) {
    dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO);
    execve(path, arguments, environment);
    _exit(127);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

TEST(IsaChildTest, CurrentIsWhatTheEnvironmentSays) {
  const char* expected = std::getenv("RINGSPAN_TEST_EXPECTED_ISA");
  if (expected == nullptr) GTEST_SKIP() << "runs in the child process of IsaTest only";
  if (std::string(expected) == "refused") {
    EXPECT_THROW(current_isa(), Error);
  } else {
    EXPECT_EQ(std::string(name_of(current_isa())), expected);
  }
}

TEST(IsaTest, EnvironmentForcesEachAvailableOne) {
  for (const Isa isa : available_isas()) {
    EXPECT_EQ(exit_status_with(name_of(isa), name_of(isa)), 0);
  }
  // The child can fail, or the lines above would prove nothing.
  EXPECT_EQ(exit_status_with("generic", "avx512"), 1);
}

TEST(IsaTest, EnvironmentIsRefusedWhereThisMachineLacksIt) {
  EXPECT_EQ(exit_status_with("sse9", "refused"), 0);
  const std::vector<Isa> available = available_isas();
  for (const Isa isa : kAllIsas) {
    if (std::find(available.begin(), available.end(), isa) != available.end()) continue;
    EXPECT_EQ(exit_status_with(name_of(isa), "refused"), 0);
  }
}

TEST(IsaTest, NamesParseBack) {
  for (const Isa isa : kAllIsas) EXPECT_EQ(parse_isa(name_of(isa)), isa);
  EXPECT_STREQ(name_of(Isa::kAvx512Bf16), "avx512_bf16");
  try {
    parse_isa("sse9");
    FAIL() << "sse9 was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("sse9"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("generic"), std::string::npos);
  }
}

TEST(IsaTest, GenericIsAlwaysThereAndTheOrderAscends) {
  const std::vector<Isa> available = available_isas();
  ASSERT_FALSE(available.empty());
  EXPECT_EQ(available.front(), Isa::kGeneric);
  EXPECT_TRUE(std::is_sorted(available.begin(), available.end()));
}

TEST(IsaTest, ForcingHoldsUntilReleased) {
  const Isa before = current_isa();
  for (const Isa isa : available_isas()) {
    force_isa(isa);
    EXPECT_EQ(current_isa(), isa);
  }
  force_isa(std::nullopt);
  EXPECT_EQ(current_isa(), before);
  const std::vector<Isa> available = available_isas();
  for (const Isa isa : kAllIsas) {
    if (std::find(available.begin(), available.end(), isa) != available.end()) continue;
    EXPECT_THROW(force_isa(isa), Error);
  }
  EXPECT_EQ(current_isa(), before);
}

}  // namespace
}  // namespace ringspan
