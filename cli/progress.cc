#include "cli/progress.h"

#include <iostream>

#include <unistd.h>

#include "ringspan/base/error.h"

namespace ringspan::cli {
namespace {

// Often enough to be seen moving; work that ends before the first is not long.
constexpr std::chrono::milliseconds kInterval{300};
constexpr const char* kClearLine = "\r\033[K";

}  // namespace

Progress::Progress() : shows_(isatty(STDERR_FILENO) == 1), next_(Clock::now() + kInterval) {}

Progress::~Progress() { clear(); }

void Progress::say(const std::string& text) {
  if (!shows_) return;
  std::cerr << kClearLine << text << std::flush;
  is_dirty_ = true;
}

void Progress::count(const char* what, int64_t done, int64_t total) {
  if (!shows_ || Clock::now() < next_) return;
  next_ = Clock::now() + kInterval;
  say(concat(what, " ", done, " of ", total));
}

void Progress::clear() {
  if (!is_dirty_) return;
  std::cerr << kClearLine << std::flush;
  is_dirty_ = false;
}

}  // namespace ringspan::cli
