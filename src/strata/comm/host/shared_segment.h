// The memory that one process shares with the other ranks of its host: one memfd that holds the
// control block, the directory of buffers and, behind them, the buffers. It has no name in any file
// system: peers open it through /proc, and the kernel frees it with the last process that maps it,
// however that process ends.
// Buffers get fresh offsets of the (sparse) file; freeing one gives its pages back at once.
// Threads: one thread of the rank at a time; a buffer may go in any. Errors: OutOfMemoryError,
// UsageError.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "strata/base/file_descriptor.h"
#include "strata/comm/collectives.h"
#include "strata/comm/host/control_block.h"
#include "strata/comm/host/rank_link.h"
#include "strata/memory/host_buffer.h"

namespace strata::comm {

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

// The content of a segment at offset 0.
struct SegmentHeader {
  std::uint64_t key = 0;  // random: proves that a peer opened the right file
  ControlBlock control;
  BufferDirectory directory;
};

class SharedSegment : public std::enable_shared_from_this<SharedSegment> {
 public:
  explicit SharedSegment(int rank);

  int fd() const { return file_.get(); }
  SegmentHeader& header() const { return *header_; }
  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes);
  std::optional<BufferView> find(std::uint64_t id) const;

 private:
  friend class SegmentBuffer;
  struct Living {
    std::size_t slot;
    BufferRange place;
    std::shared_ptr<const memory::MappedMemory> memory;
  };

  void free(std::uint64_t id);
  void take_pages(std::uint64_t id) const;
  void punch(const BufferRange& place) const;

  int rank_;
  FileDescriptor file_;
  memory::MappedMemory header_memory_;
  SegmentHeader* header_ = nullptr;
  // Buffers may go in another thread than the rank's, with the last view of their memory.
  mutable std::mutex mutex_;  // guards what follows, and changes of the directory
  Bytes end_;                 // of the file: where the next buffer goes
  std::unordered_map<std::uint64_t, Living> living_;
};

}  // namespace strata::comm
