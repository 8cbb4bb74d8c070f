// Progress of long work: one line on standard error, overwritten in place and erased at the end; only on a terminal.
#pragma once

#include <chrono>
#include <string>

namespace ringspan::cli {

class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void say(const std::string& text);
  // "what done of total", a few times a second.
  void count(const char* what, int64_t done, int64_t total);
  // Before something is printed.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;

  bool shows_ = false, is_dirty_ = false;
  Clock::time_point next_;
};

}  // namespace ringspan::cli
