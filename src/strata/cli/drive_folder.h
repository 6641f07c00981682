// A folder whose drive is to be measured: what file system it is of, whether a file fits, and the
// file. Threads: one. Ownership: the file has no name, so that it is gone when it is closed,
// even if the process is killed. Errors: UsageError if the folder is missing, not writable or too
// full.
#pragma once

#include <string>

#include "strata/base/units.h"
#include "strata/io/file.h"

namespace strata::cli {

class DriveFolder {
 public:
  // Takes the space at once.
  DriveFolder(std::string path, Bytes bytes);

  const std::string& path() const { return path_; }
  const std::string& file_system() const { return file_system_; }  // "ext4"
  // Past the page cache, where that is offered.
  const io::File& file() const { return file_; }
  bool direct() const;
  // A remark on the figures; empty: none.
  std::string remark() const;

 private:
  std::string path_;
  std::string file_system_;
  bool is_memory_ = false;
  bool is_network_ = false;
  io::File file_;
};

}  // namespace strata::cli
