#include "strata/engine/record/init_report.h"

#include <algorithm>
#include <utility>

namespace strata::engine {
namespace {

// Often enough for a progress bar; asking the driver more often would cost more than it tells.
constexpr std::chrono::milliseconds kLookEvery(20);

}  // namespace

InitReport::InitReport(device::Device& device)
    : device_(device), free_at_start_(device.free_bytes()), least_free_(free_at_start_) {}

void InitReport::sample() {
  least_free_ = std::min(least_free_, device_.free_bytes());
}

void InitReport::add(const std::string& name, double seconds, Bytes bytes) {
  for (InitPhase& phase : phases_) {
    if (phase.name != name) continue;
    phase.seconds += seconds;
    phase.bytes += bytes;
    return;
  }
  phases_.push_back({name, seconds, bytes});
}

InitReport::Phase::Phase(InitReport& report, std::string name, Bytes total)
    : report_(report),
      name_(std::move(name)),
      total_(total),
      start_(std::chrono::steady_clock::now()) {}

void InitReport::Phase::moved(Bytes bytes) {
  done_ += bytes;
  const auto now = std::chrono::steady_clock::now();
  if (done_ < total_ && now - report_.last_look_ < kLookEvery) return;
  report_.last_look_ = now;
  report_.sample();
  if (report_.progress) report_.progress(name_, done_, total_);
}

void InitReport::Phase::end() {
  if (!std::exchange(open_, false)) return;
  const std::chrono::duration<double> lasted = std::chrono::steady_clock::now() - start_;
  report_.add(name_, lasted.count(), done_);
}

}  // namespace strata::engine
