// A rank's own folder for states on a drive, below a path that users name. It is private to its
// user, locked while its rank lives, and removed at the end. Two jobs may use one path; each makes
// its own folders. The next job of the same user removes the folders of killed jobs: a folder
// without a held lock has no owner any more. A network file system may not show locks of other
// hosts, so there a job removes only leftovers of its own host.
// Threads: one. Ownership: owns the folder; its users close their files in it first. Errors:
// IoError for an unusable path. A leftover that cannot be removed is no error.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>

#include "strata/io/file.h"

namespace strata::offload {

class SwapFolder {
 public:
  // `path`: an existing folder. Making it could fill another drive when the named one is not
  // mounted.
  SwapFolder(const std::string& path, int rank);
  ~SwapFolder();
  SwapFolder(const SwapFolder&) = delete;
  SwapFolder& operator=(const SwapFolder&) = delete;

  const std::string& path() const { return folder_; }  // its own, absolute

  enum class Medium { kDrive, kMemory, kNetwork };
  Medium medium() const { return medium_; }
  std::string_view file_system() const { return file_system_; }  // "tmpfs"; empty: not a known one
  // The number of folders of ended jobs that were removed.
  int removed() const { return removed_; }
  // A message for users, shown once, if the path is not on a drive; empty otherwise.
  std::string remark() const;

 private:
  bool make(int rank);
  void remove_leftovers();
  bool remove_leftover(const std::string& folder) const;

  std::string root_;
  std::string folder_;
  io::FileLock lock_;
  Medium medium_ = Medium::kDrive;
  std::string_view file_system_;
  bool locks_ = true;  // whether the file system has them
  int removed_ = 0;
  pid_t owner_ = 0;  // a process that was forked removes nothing
};

}  // namespace strata::offload
