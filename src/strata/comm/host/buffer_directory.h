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
  std::optional<std::size_t> insert(std::uint64_t id, BufferRange place);
  void erase(std::size_t slot);

  std::optional<BufferRange> find(std::uint64_t id) const;
  // Grows with every change: what was found stays true while this stays the same.
  std::uint64_t changes() const { return changes_.load(std::memory_order_acquire); }

 private:
  struct Slot {
    std::atomic<std::uint32_t> version{0};
    std::atomic<std::uint64_t> id{0};  // 0: free
    std::atomic<std::int64_t> offset{0};
    std::atomic<std::int64_t> bytes{0};
  };

  void write(Slot& slot, std::uint64_t id, BufferRange place);

  std::atomic<std::uint64_t> changes_{0};
  std::atomic<std::uint64_t> used_{0};  // slots from here on were never in use
  std::array<Slot, kDirectorySlots> slots_{};
};

}  // namespace strata::comm
