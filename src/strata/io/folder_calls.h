// Seam: operations on names of files and folders, and those that bring files to disk. Bytes go
// through IoEngine; both together decide which state a power failure leaves. This class calls the
// system; tests override it. Threads: safe everywhere. Errors: IoError with the
// path and errno's text.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "strata/base/interface.h"
#include "strata/io/file.h"

namespace strata::io {

class FolderCalls : public Interface {
 public:
  // Makes a folder; its parents must exist, and its name must be free.
  virtual void make_folder(const std::string& path);
  // The space that this process may still use in the file system of an existing folder; absent if
  // the file system does not report it.
  virtual std::optional<Bytes> free_space(const std::string& folder);
  // Makes a file, as File::Mode::kCreateNew does.
  virtual File create(const std::string& path);
  // Takes a new file's space: File::reserve().
  virtual void reserve(File& file, Bytes bytes) { file.reserve(bytes); }
  // From now on the file's bytes survive; its name does so after sync_folder().
  virtual void sync_file(File& file) { file.sync(); }
  // Entries that were made, renamed or removed in the folder survive from now on.
  virtual void sync_folder(const std::string& path);
  // Replaces a file that has the name `to`; a folder's new name must be free.
  virtual void rename(const std::string& from, const std::string& to);
  // Both exist, and exchange their names at one moment. False if the file system cannot do that.
  virtual bool exchange(const std::string& one, const std::string& other);
  // Removes a file, or a folder with its content; removes links and does not follow them. No error
  // if the path does not exist.
  virtual void remove_tree(const std::string& path);
  // Gives a file of create() the permissions that any new file of this process has.
  virtual void open_to_others(const File& file);
};

// A file that appears under its name whole or not at all. It is written under a temporary name
// beside that name, brought to disk, and renamed. If the process dies on the way, the earlier file
// of that name stays, and the temporary, too. The temporary has a random name, and its creation
// fails if anything has that name, so the process follows no link of another user in a shared
// folder. Until the file is published, only its owner may read it.
// Threads: file() may be written by several threads; the rest belongs to one. Ownership: destroyed
// before publish(), this object removes the temporary. One writer a path at a time. Errors:
// IoError.

class AtomicFile : NonCopyable {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();

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
