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

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace strata::comm {

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
  void ring() noexcept;
  // Returns when the count is no longer `heard`, or after about `period`, or without a reason.
  // Spins `spins` times before it sleeps.
  void wait(std::uint32_t heard, std::chrono::milliseconds period, int spins);

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

bool same_operation(const OperationEntry& a, const OperationEntry& b);
// "reduce_scatter of 'layers.3' (4096 elements of bfloat16 a rank)"
std::string describe(const OperationEntry& entry);
void set_tag(OperationEntry& entry, std::string_view tag);

// Not 0, so that 0 can mean "none".
std::uint64_t id_of(std::string_view name);

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

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace strata::comm
