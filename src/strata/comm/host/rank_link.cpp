#include "strata/comm/host/rank_link.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "strata/base/error.h"

namespace strata::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLivenessPeriod{100};
// About 20 microseconds: a peer that is nearly there costs no system call.
constexpr int kSpins = 500;

std::string join_ranks(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

}  // namespace

RankLink::RankLink(std::unique_ptr<RankMemory> memory, const CommOptions& options)
    : memory_(std::move(memory)),
      rank_(memory_->rank()),
      world_size_(memory_->world_size()),
      timeout_(options.timeout),
      // With more ranks than cores, a spinning rank holds up the one it waits for.
      spins_(world_size_ <= static_cast<int>(std::thread::hardware_concurrency()) ? kSpins : 0),
      names_(options.names) {}

void RankLink::set_activity(std::string_view text) noexcept {
  own().activity.store(text);
}

std::uint64_t RankLink::publish(const OperationEntry& entry) {
  const std::uint64_t number = next_++;
  if (number >= kRingSlots) {
    const std::uint64_t last = number - kRingSlots;
    wait_until([&] { return unfinished_by(last); },
               [&] { return fmt::format("operation {} to be finished by all", last); });
  }
  ControlBlock& block = own();
  block.ring[number % kRingSlots] = entry;
  block.published.store(number + 1, std::memory_order_release);
  ring_peers();
  return number;
}

int RankLink::unpublished_by(std::uint64_t number) {
  for (int r = 0; r < world_size_; ++r) {
    if (memory_->control(r).published.load(std::memory_order_acquire) <= number) return r;
  }
  return kNobody;
}

int RankLink::unfinished_by(std::uint64_t number) {
  for (int r = 0; r < world_size_; ++r) {
    if (memory_->control(r).finished.load(std::memory_order_acquire) <= number) return r;
  }
  return kNobody;
}

const OperationEntry& RankLink::entry(int rank, std::uint64_t number) {
  return memory_->control(rank).ring[number % kRingSlots];
}

void RankLink::finish(std::uint64_t number) {
  own().finished.store(number + 1, std::memory_order_release);
}

void RankLink::check_agreement(std::uint64_t number) {
  const OperationEntry& mine = entry(rank_, number);
  bool all_same = true;
  for (int r = 0; r < world_size_; ++r)
    all_same = all_same && same_operation(mine, entry(r, number));
  if (all_same) return;
  std::string left;
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (int r = 0; r < world_size_; ++r) {
    const std::string departure = departure_of(r);
    if (!departure.empty()) {
      left += fmt::format("{}rank {} has left{}", left.empty() ? "" : "; ", name_of(r), departure);
      continue;
    }
    const std::string text = describe(entry(r, number));
    const auto group =
        std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == text; });
    if (group != groups.end()) {
      group->second.push_back(name_of(r));
    } else {
      groups.push_back({text, {name_of(r)}});
    }
  }
  std::vector<std::string> parts;
  for (const auto& [text, ranks] : groups) {
    parts.push_back(fmt::format("{}: {}", join_ranks(ranks), text));
  }
  if (!left.empty()) fail(fmt::format("{} (meanwhile {})", left, fmt::join(parts, "; ")));
  fail(fmt::format(
      "the ranks must start the same operations in the same order, but differ: look for code that "
      "depends on the rank, or for different models (operation {}: {})",
      number, fmt::join(parts, "; ")));
}

void RankLink::wait_until(const Missing& missing, const std::function<std::string()>& what) {
  Doorbell& bell = own().bell;
  const Clock::time_point start = Clock::now();
  Clock::time_point looked = start;
  for (;;) {
    const std::uint32_t heard = bell.count();
    const int rank = missing();
    if (rank == kNobody) return;
    if (progress_ && progress_()) continue;
    const Clock::time_point now = Clock::now();
    const bool look = now - looked >= kLivenessPeriod;
    if (look) looked = now;
    std::string gone = gone_peer(look);
    std::string stopped = stopped_peer();  // read last: a rank may give a reason before it ends
    if (!stopped.empty() || !gone.empty()) {
      // The work that a rank did before its end counts, and may be all that was missing.
      if (missing() == kNobody) return;
      if (!stopped.empty()) fail_quietly(std::move(stopped));
      fail(fmt::format("{} while rank {} waited for {}", gone, name_of(rank_), what()));
    }
    if (now - start >= timeout_) fail_by_timeout(rank, what());
    bell.wait(heard, std::min(kLivenessPeriod, timeout_), spins_);
  }
}

void RankLink::check_usable() {
  if (broken()) throw CommError(broken_);
  std::string stopped = stopped_peer();
  if (!stopped.empty()) fail_quietly(std::move(stopped));
}

std::string RankLink::stopped_peer() {
  for (int r = 0; r < world_size_; ++r) {
    const ControlBlock& block = memory_->control(r);
    const Stopped stopped = block.stopped.load(std::memory_order_acquire);
    if (r == rank_ || stopped == Stopped::kNo) continue;
    return fmt::format("rank {} {}: {}", name_of(r), stopped == Stopped::kLeft ? "left" : "stopped",
                       block.reason.data());
  }
  return {};
}

std::string RankLink::gone_peer(bool ask_system) {
  for (int r = 0; r < world_size_; ++r) {
    if (r == rank_) continue;
    if (memory_->control(r).destroyed.load(std::memory_order_acquire) != 0) {
      const std::string words = departure_of(r);
      return fmt::format("rank {} has left{}", name_of(r),
                         words.empty() ? " (its collectives were destroyed)" : words);
    }
    if (!ask_system) continue;
    const std::string why = memory_->why_gone(r);
    if (!why.empty()) return fmt::format("rank {} is gone ({})", name_of(r), why);
  }
  return {};
}

std::string RankLink::departure_of(int rank) {
  const ControlBlock& block = memory_->control(rank);
  if (block.departs.load(std::memory_order_acquire) == 0) return {};
  return fmt::format(": {}", block.departure.data());
}

void RankLink::announce_departure(std::string_view words) noexcept {
  ControlBlock& block = own();
  if (block.departs.load(std::memory_order_relaxed) != 0) return;
  // The last byte stays 0.
  std::copy_n(words.begin(), std::min(words.size(), kReasonChars - 1), block.departure.begin());
  block.departs.store(1, std::memory_order_release);
}

void RankLink::fail_by_timeout(int missing, const std::string& what) {
  const ControlBlock& block = memory_->control(missing);
  const std::uint64_t published = block.published.load(std::memory_order_acquire);
  const std::string activity = block.activity.load();
  fail(fmt::format(
      "rank {} waited too long for {}: rank {} lives but did not come; look there for a hang or "
      "for "
      "another order of calls, or raise the timeout (rank {} has started {} operations, its last "
      "call: {}; timeout {} s)",
      name_of(rank_), what, name_of(missing), name_of(missing), published,
      activity.empty() ? "none" : activity, std::chrono::duration<double>(timeout_).count()));
}

void RankLink::ring_peers() noexcept {
  for (int r = 0; r < world_size_; ++r) {
    if (r != rank_) memory_->control(r).bell.ring();
  }
}

void RankLink::stop(Ending ending, std::string_view reason) noexcept {
  ControlBlock& block = own();
  if (block.stopped.load(std::memory_order_relaxed) != Stopped::kNo) return;
  // The last byte stays 0.
  std::copy_n(reason.begin(), std::min(reason.size(), kReasonChars - 1), block.reason.begin());
  block.stopped.store(ending == Ending::kLeft ? Stopped::kLeft : Stopped::kFailed,
                      std::memory_order_release);
  ring_peers();
}

void RankLink::fail(const std::string& message) {
  stop(Ending::kFailed, message);
  fail_quietly(message);
}

void RankLink::fail_quietly(std::string message) {
  if (!broken()) broken_ = std::move(message);
  throw CommError(broken_);
}

void RankLink::end(Ending ending, std::string_view reason) noexcept {
  stop(ending, reason);
  try {
    if (!broken()) {
      broken_ = fmt::format("rank {} {}: {}", name_of(rank_),
                            ending == Ending::kLeft ? "left" : "was stopped", reason);
    }
  } catch (const std::exception&) {  // no memory for the text
    broken_ = "stopped";
  }
}

void RankLink::destroyed() noexcept {
  own().destroyed.store(1, std::memory_order_release);
  ring_peers();
  try {
    if (!broken()) broken_ = "the collectives of this rank were destroyed";
  } catch (const std::exception&) {
    broken_ = "left";
  }
}

}  // namespace strata::comm
