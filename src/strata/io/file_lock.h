// The lock of an open file (flock), held by the process that took it until this object ends. A
// process that was forked meanwhile, such as a worker of a DataLoader, has the descriptor, too, and
// the kernel keeps a lock as long as any process has it. So the owner unlocks it explicitly, and a
// forked process never does, although it has a copy of this object. Threads: one. Ownership: owns
// the descriptor. Errors: take() returns them.
#pragma once

#include <sys/types.h>

#include <utility>

#include "strata/base/file_descriptor.h"

namespace strata::io {

class FileLock {
 public:
  enum class Outcome { kTaken, kHeldElsewhere, kNoLocks, kFailed };

  FileLock() = default;
  // A lock of an open file; nothing is locked yet.
  explicit FileLock(FileDescriptor file) : file_(std::move(file)) {}
  FileLock(FileLock&& other) noexcept;
  FileLock& operator=(FileLock&& other) noexcept;
  ~FileLock() { release(); }

  // Never waits. kNoLocks: the file system has no locks; kFailed: errno has the reason.
  Outcome take();
  const FileDescriptor& file() const { return file_; }

 private:
  void release() noexcept;

  FileDescriptor file_;
  pid_t owner_ = 0;  // the process that holds the lock; 0: no process
};

}  // namespace strata::io
