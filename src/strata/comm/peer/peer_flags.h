// The counts by which streams of different ranks wait for each other, in memory of the host that
// every rank maps. Each has one writer and one reader.
// Threads: flags are atomic. Ownership: a view of memory that its user keeps mapped, zeroed at
// first.
#pragma once

#include <fmt/core.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "strata/base/units.h"
#include "strata/device/device.h"

namespace strata::comm {

class PeerFlags {
 public:
  enum class Kind {
    kWritten,   // contributions to reductions that `from` has written
    kRead,      // contributions to reductions that `from` has read from `to`
    kBarrier,   // barriers before which `from` has changed what it changes
    kGathered,  // barriers before which `from` has gathered what it gathers
    kGiven,     // exchanges of values to which `from` has given its own
    kRounds,    // rounds of gathers that `from` has finished
  };

  PeerFlags() = default;
  PeerFlags(std::span<std::byte> memory, int world_size)
      : first_(memory.data()), world_size_(world_size) {}

  static Bytes bytes_for(int world_size) {
    return Bytes(static_cast<std::int64_t>(kKinds * world_size + 1 + kTurns) * world_size *
                 static_cast<std::int64_t>(kLine));
  }

  device::Flag& at(Kind kind, int from, int to) const {
    return flag((static_cast<int>(kind) * world_size_ + from) * world_size_ + to);
  }
  // How often `rank` has freed a buffer, so that its peers drop their mappings.
  device::Flag& freed(int rank) const { return flag(kKinds * world_size_ * world_size_ + rank); }

  // Where each rank puts what it gives to exchange `number`, one after another, each kLine apart.
  // Two exchanges have room: no rank gives to exchange `number` + 2 before all have taken from
  // this.
  std::span<std::byte> values(std::uint32_t number) const {
    const auto turn = static_cast<int>(number % static_cast<std::uint32_t>(kTurns));
    const int first = kKinds * world_size_ * world_size_ + world_size_ * (1 + turn);
    return {first_ + static_cast<std::size_t>(first) * kLine,
            static_cast<std::size_t>(world_size_) * kLine};
  }
  static constexpr std::size_t kLine = 64;  // a flag has a cache line to itself

  // Lets every stream of `rank` run, whatever it waits for: a peer will never write the flag.
  void release(int rank) const noexcept {
    for (int kind = 0; kind < kKinds; ++kind) {
      for (int from = 0; from < world_size_; ++from) {
        if (from != rank) at(static_cast<Kind>(kind), from, rank).store(kReleased);
      }
    }
  }
  static constexpr std::uint32_t kReleased = 0x7FFFFFFF;  // beyond all counts

 private:
  static constexpr int kKinds = 6;
  static constexpr int kTurns = 2;

  device::Flag& flag(int index) const {
    return *reinterpret_cast<device::Flag*>(first_ + static_cast<std::size_t>(index) * kLine);
  }

  std::byte* first_ = nullptr;
  int world_size_ = 0;
};

inline std::string_view text_of(PeerFlags::Kind kind) {
  constexpr std::array<std::string_view, 6> kTexts = {
      "its part of a reduction",   "it to read this rank's part of a reduction",
      "it at a barrier",           "it at a barrier",
      "its values of an exchange", "it to read this rank's new weights"};
  return kTexts.at(static_cast<std::size_t>(kind));
}

// Watches the flags of peers for which this rank's streams wait, so that no wait lasts for ever: a
// stopped or hanging peer never writes its flag, and its socket stays open. Time is counted
// in looks, some in each timeout: a whole job that is stopped and goes on again has missed at most
// one. Threads: internally synchronised. Ownership: borrows the flags, which outlive it. Units:
// milliseconds.

struct LatePeer {
  int rank = 0;
  std::string failure;  // what follows its name: "lives but ..."
};

class FlagWatch {
 public:
  static constexpr int kLooks = 4;  // in a timeout

  explicit FlagWatch(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  // A stream is about to wait until the flag, which `peer` writes, has reached `value`.
  void expect(PeerFlags::Kind kind, int peer, const device::Flag& flag, std::uint32_t value) {
    const std::lock_guard lock(mutex_);
    const auto [place, is_new] = waits_.try_emplace(&flag, Wait{kind, peer, value, value});
    Wait& wait = place->second;
    wait.newest = value;
    if (is_new || !device::reached(flag.load(), wait.oldest)) return;
    wait.oldest = value;
    wait.looks = 0;
  }
  // Called kLooks times in a timeout. A peer for which a stream waited at more looks in a row.
  std::optional<LatePeer> look() {
    const std::lock_guard lock(mutex_);
    for (auto& [flag, wait] : waits_) {
      const std::uint32_t count = flag->load();
      if (device::reached(count, wait.oldest)) {
        wait.oldest = wait.newest;
        wait.looks = 0;
      }
      if (device::reached(count, wait.oldest) || ++wait.looks <= kLooks) continue;
      return LatePeer{
          wait.peer,
          fmt::format("lives but does not come: this rank's streams have waited for {} longer than "
                      "the timeout of {} ms; look there for a process that is stopped, hangs or "
                      "runs torch.compile",
                      text_of(wait.kind), timeout_.count())};
    }
    return std::nullopt;
  }

 private:
  // The oldest value of one flag that is not known to be there, and the newest.
  struct Wait {
    PeerFlags::Kind kind = PeerFlags::Kind::kWritten;
    int peer = 0;
    std::uint32_t oldest = 0;
    std::uint32_t newest = 0;
    int looks = 0;  // at which the oldest was not there
  };

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::map<const device::Flag*, Wait> waits_;  // guarded by mutex_
};

}  // namespace strata::comm
