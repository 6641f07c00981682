// Memory of another process of this host, read like a file: so that of a model which one process
// has nobody needs a copy, not even in memory that both share. The one process offers parts of its
// memory and tells the others a text; they read the parts as if they lay one behind the other in a
// file, through an engine that takes SystemCalls. Needs process_vm_readv and the right to read
// another process's memory: the same user in the same container. Where the system gives that to
// parents alone (Yama's ptrace_scope of 1), an offer gives it to what the parent of the process
// has started. Threads: immutable after construction; safe everywhere. Ownership: borrows the
// parts, whose bytes nobody may write meanwhile. Errors: IoError where memory cannot be read.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "strata/io/file.h"
#include "strata/io/system_calls.h"

namespace strata::io {

// Others can read while it lives.
class OfferedMemory {
 public:
  explicit OfferedMemory(std::vector<std::span<const std::byte>> parts);
  ~OfferedMemory();
  OfferedMemory(const OfferedMemory&) = delete;
  OfferedMemory& operator=(const OfferedMemory&) = delete;

  // For the constructor of ProcessMemory.
  std::string to_text() const;

 private:
  std::vector<std::span<const std::byte>> parts_;
  std::array<std::uint64_t, 2> key_;  // by which readers see that it is this process
  bool permitted_ = false;
};

class ProcessMemory final : public SystemCalls {
 public:
  // IoError if this process cannot read it: it says why.
  explicit ProcessMemory(const std::string& text);

  // What an engine with these calls reads; no other engine does.
  const File& file() const { return file_; }
  // Where the offered part of this number begins in it.
  Bytes offset_of(std::size_t part) const { return parts_[part].offset; }

  std::int64_t read_at(int fd, std::span<std::byte> target, Bytes offset) override;
  std::int64_t write_at(int fd, std::span<const std::byte> source, Bytes offset) override;

 private:
  struct Part {
    Bytes offset;
    std::uintptr_t address;
    Bytes bytes;
  };
  struct Offer {
    pid_t pid;
    std::uintptr_t key_address;
    std::array<std::uint64_t, 2> key;
    std::vector<Part> parts;

    static Offer from_text(const std::string& text);
  };
  explicit ProcessMemory(Offer offer);

  pid_t pid_;
  std::vector<Part> parts_;
  File file_;  // that of the system for this memory: what errors name
};

}  // namespace strata::io
