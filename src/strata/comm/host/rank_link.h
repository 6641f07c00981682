// One rank's connection to the others of its host: the state that each rank shows its peers in
// memory that all of them map, and the link that goes by it. Threads, errors: with each.
#pragma once

#include <fmt/core.h>
#include <fmt/ranges.h>
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

#include "strata/base/dtype.h"
#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/comm/collectives.h"

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
enum class OperationKind : std::uint32_t {
  kReduceScatter,
  kExchange,
  kAllReduce,
  kBroadcast,
  kText,
  kBarrier
};

struct OperationEntry {
  OperationKind kind = OperationKind::kBarrier;
  std::uint32_t detail = 0;     // DType, the print of parcels, ReduceOp or root, by kind
  std::int64_t count = 0;       // elements of a slice, values or bytes, by kind
  std::uint64_t tag_hash = 0;   // of the whole tag; `tag` may be cut
  std::uint64_t buffer_id = 0;  // where the contribution lies, or the parcels
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
    case OperationKind::kExchange:
      return fmt::format("exchange of '{}' ({} bytes in all, parcels {:08x})", tag, entry.count,
                         entry.detail);
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

// One rank's connection to the others: numbers its operations, publishes them, waits for peers, and
// turns whatever goes wrong into one CommError that every later call throws again.
// While it waits it calls `progress`, which does work that peers may be waiting for in turn.
// Threads: one thread at a time. Errors: see collectives.h.
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
