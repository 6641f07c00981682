// Another rank's process: its segment, which this rank maps piece by piece as it reads it, and
// whether the process still lives. Threads: one thread of this rank at a time. Errors: CommError
// when it cannot be reached.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "strata/base/file_descriptor.h"
#include "strata/comm/host/rank_memory.h"
#include "strata/comm/host/shared_segment.h"

namespace strata::comm {

// How a process tells others where its segment is.
struct SegmentAddress {
  std::string host;  // the kernel's boot id
  pid_t pid = 0;
  int fd = -1;
  std::uint64_t key = 0;

  static SegmentAddress of(const SharedSegment& segment);
  std::string to_text() const;
  static SegmentAddress from_text(const std::string& text);
};

class RankProcess {
 public:
  RankProcess(int rank, const SegmentAddress& address);

  ControlBlock& control() { return header_->control; }
  std::optional<BufferView> find(std::uint64_t id);
  std::string why_gone() const;

 private:
  struct Mapping {
    BufferRange place;
    std::shared_ptr<const memory::MappedMemory> memory;
  };

  void drop_stale_mappings();

  int rank_;
  pid_t pid_;
  FileDescriptor process_;  // readable when it has ended
  FileDescriptor segment_;
  memory::MappedMemory header_memory_;
  SegmentHeader* header_ = nullptr;
  std::uint64_t seen_changes_ = 0;
  std::unordered_map<std::uint64_t, Mapping> mappings_;  // by id
};

}  // namespace strata::comm
