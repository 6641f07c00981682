// A command's progress as one line of a terminal that is written over: shown once the work has
// lasted a second, at most ten times a second, and cleared at its end. Without a terminal nothing
// is written. Threads: one. Ownership: borrows the console.
#pragma once

#include <chrono>
#include <functional>
#include <ostream>
#include <string>

#include "strata/base/units.h"

namespace strata::cli {

using Clock = std::chrono::steady_clock;

// Where a command writes: its report, and beside it messages and progress.
struct Console {
  std::ostream& out;
  std::ostream& err;
  bool err_is_terminal = false;
  std::function<Clock::time_point()> now = [] { return Clock::now(); };
};

class Progress {
 public:
  // `what` is done to `total` bytes: "verifying".
  Progress(std::string what, Bytes total, Console& console);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void add(Bytes done);

 private:
  void show(Clock::time_point now);

  std::string what_;
  Bytes total_;
  Console& console_;
  Bytes done_;
  Clock::time_point started_;
  Clock::time_point shown_;
  bool visible_ = false;
};

}  // namespace strata::cli
