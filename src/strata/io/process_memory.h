// Memory of another process of this host, read like a file: the other processes load a model from
// the one that has it, without a copy of the whole. That one offers parts of its memory and sends
// the others a text. They read the parts as if they lay one behind the other in a file, through an
// engine that takes SystemCalls. This needs process_vm_readv and the right to read another
// process's memory: the same user in the same container. Threads: an offer belongs to one; a
// ProcessMemory is immutable, safe everywhere. Ownership: borrows the parts; no thread writes their
// bytes meanwhile. Errors: IoError where memory cannot be read.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/io/file.h"
#include "strata/io/pending_range.h"

namespace strata::io {

// A part's address in the process that offers it.
struct MemoryRange {
  std::uint64_t address;
  std::uint64_t bytes;
};

// Other processes can read the memory while this lives.
class OfferedMemory : NonCopyable {
 public:
  explicit OfferedMemory(std::span<const std::span<const std::byte>> parts);
  ~OfferedMemory();

  // For the constructor of ProcessMemory.
  std::string to_text() const;
  // Where the system lets only a parent read (Yama's ptrace_scope of 1): all processes that this
  // process's parent has started may read, too, until the offer ends. This replaces an earlier
  // permission of the process (PR_SET_PTRACER).
  void permit_siblings();

 private:
  std::array<std::uint64_t, 2> key_;  // shows readers that it is this process
  std::vector<MemoryRange> parts_;
  bool permitted_ = false;
};

// The system does not let this process read the other's memory.
struct NotPermitted : IoError {
  using IoError::IoError;
};

class ProcessMemory final : public SystemCalls {
 public:
  // IoError if this process cannot read the memory; NotPermitted if a permission might change that.
  explicit ProcessMemory(const std::string& text);

  // The file that engines with these calls read; no other engine can.
  const File& file() const { return *file_; }
  // The offset in that file at which the offered part of this number begins.
  Bytes offset_of(std::size_t part) const { return offsets_[part]; }

  std::int64_t read_at(int fd, std::span<std::byte> target, Bytes offset) override;
  std::int64_t write_at(int fd, std::span<const std::byte> source, Bytes offset) override;

 private:
  pid_t pid_ = 0;
  std::vector<MemoryRange> parts_;
  std::vector<Bytes> offsets_;  // of the parts
  std::optional<File> file_;    // that of the system for this memory: what errors name
};

}  // namespace strata::io
