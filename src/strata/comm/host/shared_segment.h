// The memory that one process shares with the other ranks of its host: one memfd that holds the
// control block, the directory of buffers and, behind them, the buffers. It has no name in any file
// system: peers open it through /proc, and the kernel frees it with the last process that maps it,
// however that process ends.
// Buffers get fresh offsets of the (sparse) file; freeing one gives its pages back at once.
// Threads: one thread of the rank at a time; a buffer may go in any. Errors: OutOfMemoryError,
// UsageError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "strata/base/file_descriptor.h"
#include "strata/comm/collectives.h"
#include "strata/comm/host/buffer_directory.h"
#include "strata/comm/host/control_block.h"
#include "strata/comm/host/rank_memory.h"
#include "strata/memory/mapped_memory.h"

namespace strata::comm {

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
