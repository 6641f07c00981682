// Memory of another process of this host, read like a file: so that of a model which one process
// has nobody needs a copy, not even in memory that both share. The one process offers parts of its
// memory and tells the others a text; they read the parts as if they lay one behind the other in a
// file, through an engine that takes SystemCalls. Needs process_vm_readv and the right to read
// another process's memory: the same user in the same container. Threads: an offer belongs to one;
// a ProcessMemory is immutable after construction, safe everywhere. Ownership: borrows the parts,
// whose bytes nobody may write meanwhile. Errors: IoError where memory cannot be read.
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
#include "strata/io/file.h"
#include "strata/io/system_calls.h"

namespace strata::io {

// As another process of this host sees it.
struct MemoryPart {
  std::uint64_t address;
  std::uint64_t bytes;
};

// Others can read while it lives.
class OfferedMemory {
 public:
  explicit OfferedMemory(std::span<const std::span<const std::byte>> parts);
  ~OfferedMemory();
  OfferedMemory(const OfferedMemory&) = delete;
  OfferedMemory& operator=(const OfferedMemory&) = delete;

  // For the constructor of ProcessMemory.
  std::string to_text() const;
  // Where the system lets nobody but a parent read (Yama's ptrace_scope of 1): from now on and
  // until the end of the offer, what the parent of this process has started may, too. What the
  // process permitted before (PR_SET_PTRACER) is lost.
  void permit_siblings();

 private:
  std::array<std::uint64_t, 2> key_;  // by which readers see that it is this process
  std::vector<MemoryPart> parts_;
  bool permitted_ = false;
};

// The system does not let this process read the other's memory.
class NotPermitted : public IoError {
 public:
  using IoError::IoError;
};

class ProcessMemory final : public SystemCalls {
 public:
  // IoError if this process cannot read it; NotPermitted if it might, were it permitted.
  explicit ProcessMemory(const std::string& text);

  // What an engine with these calls reads; no other engine does.
  const File& file() const { return *file_; }
  // Where the offered part of this number begins in it.
  Bytes offset_of(std::size_t part) const { return offsets_[part]; }

  std::int64_t read_at(int fd, std::span<std::byte> target, Bytes offset) override;
  std::int64_t write_at(int fd, std::span<const std::byte> source, Bytes offset) override;

 private:
  pid_t pid_ = 0;
  std::vector<MemoryPart> parts_;
  std::vector<Bytes> offsets_;  // of the parts
  std::optional<File> file_;    // that of the system for this memory: what errors name
};

}  // namespace strata::io
