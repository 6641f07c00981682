// How commands write to a terminal: their reports, the console with a line of progress, tables of
// text, numbers and sizes as people read and write them. Threads: one; but for Progress, values and
// pure functions, safe everywhere. Errors: UsageError for a text that is no size.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "strata/base/interface.h"
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

// The result of a command.
struct Report {
  nlohmann::json json;  // for programs
  std::string text;     // for people
  bool right = true;    // false: what was looked at is damaged, different, or does not fit
};

// A command's progress as one line of a terminal that is written over: shown once the work has
// lasted a second, at most ten times a second, and cleared at its end. Without a terminal nothing
// is written. Borrows the console.
class Progress : NonCopyable {
 public:
  // `what` is done to `total` bytes: "verifying".
  Progress(std::string what, Bytes total, Console& console);
  ~Progress();

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

// A table of text for a terminal: columns as wide as their widest cell, the first to the left, the
// others to the right, a line below the head and above the last rows.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> head) : head_(std::move(head)) {}
  // As many cells as the head has, or fewer.
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  // A line before the row that is added next.
  void add_line() { lines_.push_back(rows_.size()); }
  // Columns that stand to the left, too.
  void align_left(std::size_t column) { left_.push_back(column); }

  std::string text() const;

 private:
  std::vector<std::string> head_;
  std::vector<std::vector<std::string>> rows_;
  std::vector<std::size_t> lines_;
  std::vector<std::size_t> left_{0};
};

// 4022468096 as "4,022,468,096".
std::string with_commas(std::int64_t number);

// "1 tensor", "3 tensors".
std::string count_of(std::size_t number, const std::string& noun);

// The order in which people count: "layers.9" before "layers.10". A strict total order.
struct NaturalLess {
  bool operator()(const std::string& a, const std::string& b) const;
};

// Sizes as people write them on a command line: "5GB" (10^9 bytes), "80GiB" (2^30), "4096".
// Positive; a fraction is allowed where there is a unit ("1.5TiB"). Letters may be of either case.
// Errors: UsageError that names the option.
Bytes parse_byte_size(std::string_view text, std::string_view option);

// Writes a file whole or not at all: a reader of the old one may be the next one of the new.
// Errors: IoError that names the option.
void write_whole(const std::string& path, const std::string& text, std::string_view option);

}  // namespace strata::cli
