// A file that appears under its name whole or not at all: it is written as "<path>.partial",
// brought to disk, and renamed. A process that dies on the way leaves the earlier file of that name
// untouched. Threads: file() may be written by several threads; the rest belongs to one. Ownership:
// the temporary belongs to this object, which removes it when destroyed before publish(). One
// writer a path at a time. Errors: IoError.
#pragma once

#include <string>

#include "strata/io/file.h"

namespace strata::io {

inline constexpr const char* kPartialSuffix = ".partial";

class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  const std::string& path() const { return path_; }
  File& file() { return file_; }
  // Brings the content to disk; nothing is visible yet.
  void seal();
  // Renames, seals before if that was not done, and brings the folder's entry to disk.
  void publish();

 private:
  std::string path_;
  File file_;
  bool sealed_ = false;
  bool published_ = false;
};

// Removes a file; one that is not there is no error. True if there was one.
bool remove_file(const std::string& path);

}  // namespace strata::io
