// An open file: a descriptor with its path, so that every error can name the file. A file may have
// a second descriptor, for transfers that bypass the page cache (O_DIRECT). A user of the layer's
// engines need not know that: the engines send the bytes that cannot go that way through the cache.
// Threads: several threads at once may use size() and the descriptors; opening, moving and
// destroying belong to one. Ownership: closes its descriptors. Errors: IoError with the path and
// errno's text.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "strata/base/file_descriptor.h"
#include "strata/base/units.h"

namespace strata::io {

class File {
 public:
  enum class Mode {
    kRead,       // an existing file
    kCreate,     // made or emptied; readable and writable
    kCreateNew,  // made, readable and writable by its owner alone; refused where anything has the
                 // name, a link too
    kReadWrite,  // an existing file, content kept
  };
  // Regular files and block devices only: anything else (a directory, a pipe) is refused without
  // waiting for it.
  File(std::string path, Mode mode);

  // A new file without a name, readable and writable, that lies in memory.
  static File in_memory(std::span<const std::byte> content);

  // Transfers that bypass the page cache have offsets, lengths and addresses that are multiples of
  // it.
  static constexpr Bytes kDirectBlock = 4_KiB;

  // The same file, even if its path names another file by now, opened for reading, and for writing
  // if this one is. Its transfers bypass the page cache as far as ranges and memory lie at blocks.
  // If the file system does not offer that, or needs larger blocks, all transfers go through the
  // cache: see direct_fd().
  File direct() const;

  int fd() const { return descriptor_.get(); }
  // The descriptor for transfers of whole blocks past the page cache; -1: none.
  int direct_fd() const { return direct_.get(); }
  const std::string& path() const { return path_; }
  Bytes size() const;
  // Takes the space now and grows the file to at least `bytes`, so that a full disk fails here,
  // before the first byte is written.
  void reserve(Bytes bytes);
  void sync();  // fsync

 private:
  File(std::string path, FileDescriptor descriptor, FileDescriptor direct);

  std::string path_;
  FileDescriptor descriptor_;
  FileDescriptor direct_;  // invalid: none
};

// Throws the IoError of a call that has just failed: "<what>: path=<path> <errno>".
[[noreturn]] void throw_errno(std::string_view what, std::string_view path);

// The lock of an open file (flock), held by the process that took it until this object ends. A
// process that was forked meanwhile, such as a worker of a DataLoader, has the descriptor, too, and
// the kernel keeps a lock as long as any process has it. So the owner unlocks it explicitly, and a
// forked process never does, although it has a copy of this object. Threads: one. Ownership: owns
// the descriptor. Errors: take() returns them.

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

// The number of files that a process may have open at once. Systems set a low soft limit for the
// sake of programs that use select(); any process may raise its own up to the hard limit. Threads:
// safe everywhere; the limit is the process's, and is only ever raised. Errors: none; if the hard
// limit is too low, opening a file fails and reports that.

// Raises the soft limit until `more` descriptors fit beside the open ones, or up to the hard limit.
void allow_descriptors(std::size_t more);

// Whether bytes of a file are in the system's page cache, which decides how fast a buffered read of
// them is. Threads: safe everywhere. Errors: none; systems and file systems that do not report it
// are no error.

// How files are read: through the cache, past it, or as each reader finds out to be faster.
enum class ReadWay { kAuto, kBuffered, kDirect };

// Whether the page at `offset` is in the cache; absent if that is unknown. This does not use
// mincore(2), which calls all pages of other users' files resident.
std::optional<bool> in_page_cache(const File& file, Bytes offset);

}  // namespace strata::io
