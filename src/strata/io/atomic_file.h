// A file that appears under its name whole or not at all. It is written under a temporary name
// beside that name, brought to disk, and renamed. If the process dies on the way, the earlier file
// of that name stays untouched, and the temporary stays, too. The temporary has a random name, and
// its creation fails if anything has that name. So the process follows no link that another user
// left in a shared folder. Until the file is published, only its owner may read it.
//
// Threads: file() may be written by several threads; the rest belongs to one. Ownership: the
// temporary belongs to this object, which removes it when destroyed before publish(). One writer a
// path at a time. Errors: IoError.
#pragma once

#include <string>
#include <string_view>

#include "strata/io/file.h"

namespace strata::io {

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
  // Gives the file its name, and the permissions that any new file of this process has; seals
  // before if that was not done, and brings the folder's entry to disk.
  void publish();

  // If a killed process may have left a temporary of this name, returns the name of its final file.
  // Returns any other name unchanged.
  static std::string_view target_of(std::string_view name);

 private:
  std::string path_;
  File file_;
  bool sealed_ = false;
  bool published_ = false;
};

// A random name beside `path`: "<path>.<16 hexadecimal digits>.partial".
std::string temporary_name(const std::string& path);

// One AtomicFile that holds `text`.
void write_file_atomically(const std::string& path, std::string_view text);

// Removes a file; one that is not there is no error. True if there was one.
bool remove_file(const std::string& path);

}  // namespace strata::io
