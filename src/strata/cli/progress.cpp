#include "strata/cli/progress.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace strata::cli {
namespace {

constexpr auto kShownAfter = std::chrono::seconds(1);
constexpr auto kShownEvery = std::chrono::milliseconds(100);
constexpr int kBarColumns = 24;

}  // namespace

Progress::Progress(std::string what, Bytes total, Console& console)
    : what_(std::move(what)), total_(total), console_(console), started_(console.now()) {}

Progress::~Progress() {
  if (visible_) console_.err << "\r\x1b[K" << std::flush;
}

void Progress::add(Bytes done) {
  done_ += done;
  if (!console_.err_is_terminal) return;
  const Clock::time_point now = console_.now();
  if (now - started_ < kShownAfter || (visible_ && now - shown_ < kShownEvery)) return;
  show(now);
}

void Progress::show(Clock::time_point now) {
  const double part =
      total_.value > 0 ? static_cast<double>(done_.value) / static_cast<double>(total_.value) : 1.0;
  const int full = std::clamp(static_cast<int>(part * kBarColumns), 0, kBarColumns);
  std::string bar;
  for (int i = 0; i < kBarColumns; ++i) bar += i < full ? "█" : "░";
  const double seconds = std::chrono::duration<double>(now - started_).count();
  console_.err << fmt::format("\r{} {} {:3.0f} %  {} of {}  {:.2f} GB/s\x1b[K", what_, bar,
                              100 * part, to_string(done_), to_string(total_),
                              static_cast<double>(done_.value) / 1e9 / seconds)
               << std::flush;
  shown_ = now;
  visible_ = true;
}

}  // namespace strata::cli
