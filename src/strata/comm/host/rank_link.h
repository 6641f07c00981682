// One rank's connection to the others: numbers its operations, publishes them, waits for peers, and
// turns whatever goes wrong into one CommError that every later call throws again.
// While it waits it calls `progress`, which does work that peers may be waiting for in turn.
// Threads: one thread at a time. Errors: see collectives.h.
#pragma once

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/comm/collectives.h"
#include "strata/comm/host/control_block.h"

namespace strata::comm {

// Bytes of some rank's buffer; they stay mapped while keep_alive lives, even if the buffer is
// freed.
struct BufferView {
  std::shared_ptr<const void> keep_alive;
  std::span<const std::byte> bytes;
};

// How the ranks of one host reach each other's memory: the one thing in which ranks that are
// threads and ranks that are processes differ. PullCollectives does the rest. Threads: used by one
// thread of its rank at a time. Errors: CommError where peers' memory cannot be reached,
// OutOfMemoryError from allocate().
class RankMemory : public Interface {
 public:
  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // Lives as long as this object.
  virtual ControlBlock& control(int rank) = 0;
  virtual std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) = 0;
  // The living buffer whose name has this id_of(); nothing where the rank has none (yet).
  virtual std::optional<BufferView> find(int rank, std::uint64_t buffer_id) = 0;
  // "process 123 has ended", or empty while the rank lives.
  virtual std::string why_gone(int rank) = 0;
};

using Clock = std::chrono::steady_clock;

inline constexpr std::chrono::milliseconds kLivenessPeriod{100};
// About 20 microseconds: a peer that is nearly there costs no system call.
inline constexpr int kSpins = 500;

inline std::string join_ranks(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

class RankLink {
 public:
  // A rank that is not there yet, or kNobody.
  using Missing = std::function<int()>;
  static constexpr int kNobody = -1;

  RankLink(std::unique_ptr<RankMemory> memory, const CommOptions& options)
      : memory_(std::move(memory)),
        rank_(memory_->rank()),
        world_size_(memory_->world_size()),
        timeout_(options.timeout),
        // With more ranks than cores, a spinning rank holds up the one it waits for.
        spins_(world_size_ <= static_cast<int>(std::thread::hardware_concurrency()) ? kSpins : 0),
        names_(options.names) {}

  RankMemory& memory() { return *memory_; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  // The number of a rank in errors.
  int name_of(int rank) const { return names_.of(rank); }
  // Does some of the work that was put off and returns true, or false when nothing can be done now.
  void set_progress(std::function<bool()> progress) { progress_ = std::move(progress); }

  // At the start of each call: throws if this rank or a peer has stopped.
  void check_usable() {
    if (broken()) throw CommError(broken_);
    std::string stopped = stopped_peer();
    if (!stopped.empty()) fail_quietly(std::move(stopped));
  }
  // Shown to peers until the next call.
  void set_activity(std::string_view text) noexcept { own().activity.store(text); }

  // Makes `entry` my next operation and returns its number.
  std::uint64_t publish(const OperationEntry& entry) {
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
  // A rank that has not published, or finished, operation `number`, or kNobody.
  int unpublished_by(std::uint64_t number) { return behind(number, &ControlBlock::published); }
  int unfinished_by(std::uint64_t number) { return behind(number, &ControlBlock::finished); }
  // Every rank has published `number`: fails unless they agree.
  void check_agreement(std::uint64_t number) {
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
        left +=
            fmt::format("{}rank {} has left{}", left.empty() ? "" : "; ", name_of(r), departure);
        continue;
      }
      const std::string text = describe(entry(r, number));
      const auto group = std::ranges::find(groups, text, &decltype(groups)::value_type::first);
      if (group != groups.end())
        group->second.push_back(name_of(r));
      else
        groups.push_back({text, {name_of(r)}});
    }
    std::vector<std::string> parts;
    for (const auto& [text, ranks] : groups)
      parts.push_back(fmt::format("{}: {}", join_ranks(ranks), text));
    if (!left.empty()) fail(fmt::format("{} (meanwhile {})", left, fmt::join(parts, "; ")));
    fail(
        fmt::format("the ranks must start the same operations in the same order, but differ: look "
                    "for code that depends on the rank, or for different models (operation {}: {})",
                    number, fmt::join(parts, "; ")));
  }
  const OperationEntry& entry(int rank, std::uint64_t number) {
    return memory_->control(rank).ring[number % kRingSlots];
  }
  void finish(std::uint64_t number) { own().finished.store(number + 1, std::memory_order_release); }

  // Returns when missing() is kNobody; `what` says in errors what this rank was waiting for.
  void wait_until(const Missing& missing, const std::function<std::string()>& what) {
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
  void ring_peers() noexcept {
    for (int r = 0; r < world_size_; ++r) {
      if (r != rank_) memory_->control(r).bell.ring();
    }
  }

  // Breaks this object for good, notifies the peers, and throws.
  [[noreturn]] void fail(const std::string& message) {
    stop(Ending::kFailed, message);
    fail_quietly(message);
  }
  bool broken() const { return !broken_.empty(); }
  void end(Ending ending, std::string_view reason) noexcept {
    stop(ending, reason);
    try {
      if (!broken())
        broken_ = fmt::format("rank {} {}: {}", name_of(rank_),
                              ending == Ending::kLeft ? "left" : "was stopped", reason);
    } catch (const std::exception&) {  // no memory for the text
      broken_ = "stopped";
    }
  }
  // Collectives::announce_departure().
  void announce_departure(std::string_view words) noexcept {
    ControlBlock& block = own();
    if (block.departs.load(std::memory_order_relaxed) != 0) return;
    // The last byte stays 0.
    std::copy_n(words.begin(), std::min(words.size(), kReasonChars - 1), block.departure.begin());
    block.departs.store(1, std::memory_order_release);
  }
  // The rank's Collectives go, without a reason.
  void destroyed() noexcept {
    own().destroyed.store(1, std::memory_order_release);
    ring_peers();
    try {
      if (!broken()) broken_ = "the collectives of this rank were destroyed";
    } catch (const std::exception&) {
      broken_ = "left";
    }
  }

 private:
  ControlBlock& own() { return memory_->control(rank_); }
  int behind(std::uint64_t number, std::atomic<std::uint64_t> ControlBlock::*progress) {
    for (int r = 0; r < world_size_; ++r) {
      if ((memory_->control(r).*progress).load(std::memory_order_acquire) <= number) return r;
    }
    return kNobody;
  }
  // The fault of a peer, or empty. `ask_system` costs system calls.
  std::string stopped_peer() {
    for (int r = 0; r < world_size_; ++r) {
      const ControlBlock& block = memory_->control(r);
      const Stopped stopped = block.stopped.load(std::memory_order_acquire);
      if (r == rank_ || stopped == Stopped::kNo) continue;
      return fmt::format("rank {} {}: {}", name_of(r),
                         stopped == Stopped::kLeft ? "left" : "stopped", block.reason.data());
    }
    return {};
  }
  std::string gone_peer(bool ask_system) {
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
  // ": its program ended", what a peer has announced; empty: nothing.
  std::string departure_of(int rank) {
    const ControlBlock& block = memory_->control(rank);
    if (block.departs.load(std::memory_order_acquire) == 0) return {};
    return fmt::format(": {}", block.departure.data());
  }
  // Breaks this object without notifying the peers, which know it, too.
  [[noreturn]] void fail_quietly(std::string message) {
    if (!broken()) broken_ = std::move(message);
    throw CommError(broken_);
  }
  [[noreturn]] void fail_by_timeout(int missing, const std::string& what) {
    const ControlBlock& block = memory_->control(missing);
    const std::uint64_t published = block.published.load(std::memory_order_acquire);
    const std::string activity = block.activity.load();
    fail(fmt::format(
        "rank {} waited too long for {}: rank {} lives but did not come; look there for a hang, "
        "for torch.compile at work or for another order of calls, or raise the timeout (rank {} "
        "has started {} operations, its "
        "last call: {}; timeout {} s)",
        name_of(rank_), what, name_of(missing), name_of(missing), published,
        activity.empty() ? "none" : activity, std::chrono::duration<double>(timeout_).count()));
  }
  void stop(Ending ending, std::string_view reason) noexcept {
    ControlBlock& block = own();
    if (block.stopped.load(std::memory_order_relaxed) != Stopped::kNo) return;
    // The last byte stays 0.
    std::copy_n(reason.begin(), std::min(reason.size(), kReasonChars - 1), block.reason.begin());
    block.stopped.store(ending == Ending::kLeft ? Stopped::kLeft : Stopped::kFailed,
                        std::memory_order_release);
    ring_peers();
  }

  std::unique_ptr<RankMemory> memory_;
  int rank_;
  int world_size_;
  std::chrono::milliseconds timeout_;
  int spins_;
  RankNames names_;
  std::uint64_t next_ = 0;
  std::function<bool()> progress_;
  std::string broken_;  // the error's message, empty while all is well
};

}  // namespace strata::comm
