// An open file: a descriptor with its path, so that every error can name the file. A file may have
// a second descriptor, for transfers that bypass the page cache (O_DIRECT). A user of the layer's
// engines need not know that: the engines send the bytes that cannot go that way through the cache.
// Threads: several threads at once may use size() and the descriptors; opening, moving and
// destroying belong to one. Ownership: closes its descriptors. Errors: IoError with the path and
// errno's text.
#pragma once

#include <cstddef>
#include <span>
#include <string>

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

}  // namespace strata::io
