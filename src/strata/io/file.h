// An open file: a descriptor with its path, so that every error can name the file.
// Threads: size() and the descriptor may be used by several threads at once; opening, moving and
// destroying belong to one. Ownership: closes its descriptor. Errors: IoError with the path and
// errno's text.
#pragma once

#include <string>

#include "strata/base/units.h"

namespace strata::io {

class File {
 public:
  enum class Mode {
    kRead,       // an existing file
    kCreate,     // made or emptied; readable and writable
    kReadWrite,  // an existing file, content kept
  };
  // Regular files and block devices only: anything else (a directory, a pipe) is refused without
  // waiting for it.
  File(std::string path, Mode mode);
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  Bytes size() const;
  // Takes the space now and grows the file to at least `bytes`, so that a full disk is an error
  // before the first byte is written.
  void reserve(Bytes bytes);
  void sync();  // fsync

 private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace strata::io
