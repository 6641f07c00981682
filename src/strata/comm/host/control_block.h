// The state that one rank shows its peers, in memory that all of them map: the operations that it
// has published, its progress with them, small messages, and why it stopped. Only the owner writes,
// except for the bell, which peers ring.
//
// Every collective has a number, counted from 0 on each rank; operation k is described by
// ring[k % kRingSlots]. Order: the owner fills the entry (and the mailbox), then stores published =
// k+1 (release); a peer that has read published > k (acquire) may read the entry until it stores
// finished = k+1 in its own block. The owner uses a slot again only when every peer's `finished`
// has passed it. Mailboxes alternate: a rank that writes the one of round n has seen every peer
// publish round n-1, and a peer publishes that only when it has read round n-2.
#pragma once

#include <fmt/core.h>
#include <hwy/cache_control.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "strata/base/dtype.h"

namespace strata::comm {

// The word must be a futex in memory shared between processes.
static_assert(sizeof(std::atomic<std::uint32_t>) == 4);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// A short text that one thread writes while others may read it, in memory that processes share. A
// reader may see a mixture of two texts: good enough for saying in an error what a rank is doing.
// Longer texts are cut. Zeroed memory is the empty text.
template <std::size_t kChars>
class SharedText {
  static_assert(kChars % sizeof(std::uint64_t) == 0);

 public:
  void store(std::string_view text) noexcept {
    std::array<std::uint64_t, kChars / 8> words{};
    std::memcpy(words.data(), text.data(), std::min(text.size(), kChars));
    for (std::size_t i = 0; i < words.size(); ++i) {
      words_[i].store(words[i], std::memory_order_relaxed);
      if (words[i] == 0) break;  // the end of the text
    }
  }

  std::string load() const {
    std::array<char, kChars> chars{};
    for (std::size_t i = 0; i < words_.size(); ++i) {
      const std::uint64_t word = words_[i].load(std::memory_order_relaxed);
      std::memcpy(chars.data() + i * sizeof(word), &word, sizeof(word));
    }
    return {chars.begin(), std::find(chars.begin(), chars.end(), '\0')};
  }

 private:
  std::array<std::atomic<std::uint64_t>, kChars / 8> words_{};
};

// A counter that sleepers can wait on, in memory that several threads or processes share. A thread
// that changes a state for which a rank may wait rings that rank's bell afterwards.
// Protocol of the owner: heard = bell.count(); look at the state; if it is not there,
// bell.wait(heard). A ring after count() makes wait() return at once, so no change is missed.
// Threads: any number ring, one waits. Zeroed memory is a valid bell.
class Doorbell {
 public:
  std::uint32_t count() const { return rings_.load(std::memory_order_acquire); }
  void ring() noexcept {
    // Sequentially consistent on both sides: either the sleeper sees the new count, or we see it
    // sleep.
    rings_.fetch_add(1, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) != 0)
      ::syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  // Returns when the count is no longer `heard`, or after about `period`, or without a reason.
  // Spins `spins` times before it sleeps.
  void wait(std::uint32_t heard, std::chrono::milliseconds period, int spins) {
    for (int i = 0; i < spins; ++i) {
      if (count() != heard) return;
      hwy::Pause();
    }
    sleeping_.store(1, std::memory_order_seq_cst);
    if (rings_.load(std::memory_order_seq_cst) == heard) {
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(period);
      timespec limit{};
      limit.tv_sec = static_cast<time_t>(seconds.count());
      limit.tv_nsec = static_cast<long>(std::chrono::nanoseconds(period - seconds).count());
      ::syscall(SYS_futex, &rings_, FUTEX_WAIT, heard, &limit, nullptr, 0);
    }
    sleeping_.store(0, std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint32_t> rings_{0};
  std::atomic<std::uint32_t> sleeping_{0};
};

constexpr std::size_t kRingSlots = 64;
constexpr std::size_t kTagChars = 64;
constexpr std::size_t kReasonChars = 1024;
constexpr std::size_t kMailboxBytes = std::size_t{64} << 10;

enum class OperationKind : std::uint32_t {
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kText,
  kBarrier
};

struct OperationEntry {
  OperationKind kind = OperationKind::kBarrier;
  std::uint32_t detail = 0;     // DType, ReduceOp or root, by kind
  std::int64_t count = 0;       // elements of a slice, values or bytes, by kind
  std::uint64_t tag_hash = 0;   // of the whole tag; `tag` may be cut
  std::uint64_t buffer_id = 0;  // reduce_scatter: where the contribution lies
  std::int64_t buffer_offset = 0;
  std::uint64_t payload_bytes = 0;    // in the mailbox
  std::uint64_t remaining_bytes = 0;  // of a text: what follows in later rounds
  std::array<char, kTagChars> tag{};
};

// Not 0, so that 0 can mean "none".
inline std::uint64_t id_of(std::string_view name) {
  return std::max<std::uint64_t>(XXH3_64bits(name.data(), name.size()), 1);
}

inline bool same_operation(const OperationEntry& a, const OperationEntry& b) {
  return a.kind == b.kind && a.detail == b.detail && a.count == b.count && a.tag_hash == b.tag_hash;
}

// "reduce_scatter of 'layers.3' (4096 elements of bfloat16 a rank)"
inline std::string describe(const OperationEntry& entry) {
  constexpr std::array<std::string_view, 3> kOps = {"sum", "min", "max"};
  const std::string tag(entry.tag.begin(), std::find(entry.tag.begin(), entry.tag.end(), '\0'));
  switch (entry.kind) {
    case OperationKind::kReduceScatter:
      return fmt::format("reduce_scatter of '{}' ({} elements of {} a rank)", tag, entry.count,
                         name_of(static_cast<DType>(entry.detail)));
    case OperationKind::kAllReduce:
      return fmt::format("all_reduce of {} values ({})", entry.count,
                         kOps[std::min<std::size_t>(entry.detail, kOps.size() - 1)]);
    case OperationKind::kBroadcast:
      return fmt::format("broadcast of {} bytes from rank {}", entry.count, entry.detail);
    case OperationKind::kText:
      return "all_gather_text";
    case OperationKind::kBarrier:
      return "barrier";
  }
  return "unknown operation";
}

inline void set_tag(OperationEntry& entry, std::string_view tag) {
  entry.tag_hash = id_of(tag);
  entry.tag = {};
  std::copy_n(tag.begin(), std::min(tag.size(), kTagChars), entry.tag.begin());
}

enum class Stopped : std::uint32_t { kNo, kFailed, kLeft };

struct ControlBlock {
  Doorbell bell;
  std::atomic<Stopped> stopped{Stopped::kNo};  // else `reason` is set and stays
  std::atomic<std::uint32_t> destroyed{0};     // 1: this rank's Collectives are gone
  alignas(64) std::atomic<std::uint64_t> published{0};
  alignas(64) std::atomic<std::uint64_t> finished{0};  // peers' data of these operations was read
  alignas(64) SharedText<kTagChars> activity;
  std::array<char, kReasonChars> reason{};
  std::atomic<std::uint32_t> departs{0};       // 1: `departure` is set and stays
  std::array<char, kReasonChars> departure{};  // words of a program that ends
  std::array<OperationEntry, kRingSlots> ring{};
  std::array<std::array<std::byte, kMailboxBytes>, 2> mailbox{};
};

constexpr std::size_t kDirectorySlots = 32768;

struct BufferRange {
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  bool operator==(const BufferRange&) const = default;
};

// The table, in a rank's shared memory, of its living buffers: id of the name -> where it lies in
// the rank's segment. Offsets are never used twice, so an offset also tells one buffer from a later
// one of the same name. Threads: the owner changes it while peers read; each slot has a version
// that is odd during a change. Zeroed memory is an empty directory.
class BufferDirectory {
 public:
  // Owner only. Returns the slot, or nothing when all are in use.
  std::optional<std::size_t> insert(std::uint64_t id, BufferRange place) {
    const std::size_t used = used_.load(std::memory_order_relaxed);
    std::size_t at = 0;
    while (at < used && slots_[at].id.load(std::memory_order_relaxed) != 0) ++at;
    if (at == kDirectorySlots) return std::nullopt;
    write(slots_[at], id, place);
    if (at == used) used_.store(used + 1, std::memory_order_release);
    changes_.fetch_add(1, std::memory_order_release);
    return at;
  }
  void erase(std::size_t slot) {
    write(slots_[slot], 0, {});
    changes_.fetch_add(1, std::memory_order_release);
  }

  std::optional<BufferRange> find(std::uint64_t id) const {
    const std::size_t used = used_.load(std::memory_order_acquire);
    for (std::size_t at = 0; at < used; ++at) {
      const Slot& slot = slots_[at];
      if (slot.id.load(std::memory_order_relaxed) != id) continue;
      const std::uint32_t version = slot.version.load(std::memory_order_acquire);
      const std::uint64_t found = slot.id.load(std::memory_order_acquire);
      const BufferRange place{slot.offset.load(std::memory_order_acquire),
                              slot.bytes.load(std::memory_order_acquire)};
      const bool steady =
          version % 2 == 0 && slot.version.load(std::memory_order_relaxed) == version;
      if (steady && found == id) return place;
    }
    return std::nullopt;
  }
  // Grows with every change: what was found stays true while this stays the same.
  std::uint64_t changes() const { return changes_.load(std::memory_order_acquire); }

 private:
  struct Slot {
    std::atomic<std::uint32_t> version{0};
    std::atomic<std::uint64_t> id{0};  // 0: free
    std::atomic<std::int64_t> offset{0};
    std::atomic<std::int64_t> bytes{0};
  };

  // Release stores of the fields keep the odd version before them, and acquire loads of the fields
  // keep the second look at the version behind them.
  void write(Slot& slot, std::uint64_t id, BufferRange place) {
    const std::uint32_t version = slot.version.load(std::memory_order_relaxed);
    slot.version.store(version + 1, std::memory_order_relaxed);
    slot.id.store(id, std::memory_order_release);
    slot.offset.store(place.offset, std::memory_order_release);
    slot.bytes.store(place.bytes, std::memory_order_release);
    slot.version.store(version + 2, std::memory_order_release);
  }

  std::atomic<std::uint64_t> changes_{0};
  std::atomic<std::uint64_t> used_{0};  // slots from here on were never in use
  std::array<Slot, kDirectorySlots> slots_{};
};

}  // namespace strata::comm
