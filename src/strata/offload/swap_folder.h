// A rank's own folder for states on a drive, below a path that users name: private to its user,
// locked while its rank lives, removed at the end. Two jobs may be given one path; each makes its
// own folders. What killed jobs have left there is removed by the next one of the same user: a
// folder whose lock nobody holds has no owner any more. On a network file system, where locks of
// other hosts may not be seen, only leftovers of this host are.
// Threads: one. Ownership: owns the folder; whoever has files open in it closes them before.
// Errors: IoError for a path that will not do. What cannot be removed is no error.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>

#include "strata/io/file_lock.h"

namespace strata::offload {

class SwapFolder {
 public:
  // `path`: a folder that exists, for one not to fill another drive where one is not mounted.
  SwapFolder(const std::string& path, int rank);
  ~SwapFolder();
  SwapFolder(const SwapFolder&) = delete;
  SwapFolder& operator=(const SwapFolder&) = delete;

  const std::string& path() const { return folder_; }  // its own, absolute

  enum class Medium { kDrive, kMemory, kNetwork };
  Medium medium() const { return medium_; }
  std::string_view file_system() const { return file_system_; }  // "tmpfs"; empty: not a known one
  // How many folders of jobs that are gone were removed.
  int removed() const { return removed_; }
  // A remark for users, once, on a path that is not on a drive; empty: there is none.
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
