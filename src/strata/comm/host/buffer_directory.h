// The table, in a rank's shared memory, of its living buffers: id of the name -> where it lies in
// the rank's segment. Offsets are never used twice, so an offset also tells one buffer from a later
// one of the same name. Threads: the owner changes it while peers read; each slot has a version
// that is odd during a change. Zeroed memory is an empty directory.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace strata::comm {

constexpr std::size_t kDirectorySlots = 32768;

struct BufferRange {
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  bool operator==(const BufferRange&) const = default;
};

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
