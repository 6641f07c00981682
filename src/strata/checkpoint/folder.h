// The folder of a run's checkpoints, and how a new one comes into it whole or not at all.
//
// A checkpoint is written into a folder of its own under a temporary name. When it is on disk, one
// rename gives it its tag, and then `latest` names it. A save that ends before leaves the folder as
// it was, but for the temporary, which the next save removes. A tag that is saved again changes
// from the old checkpoint to the new one at one moment where the file system can exchange names;
// elsewhere the old one keeps a name from which reading finds it.
//
// Threads: one; a NewCheckpoint may be made by one thread and published by another. Ownership: a
// NewCheckpoint holds the folder's lock, and removes what it has written unless it was published;
// in a process that was forked meanwhile it does neither. Errors: IoError, FormatError; UsageError
// for a tag that is no name, or whose name something else than a checkpoint has.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "strata/format/manifest.h"
#include "strata/io/folder_calls.h"
#include "strata/io/io_engine.h"

namespace strata::checkpoint {

// A tag is a plain file name, so that it stays in its folder. UsageError.
void require_tag(std::string_view tag);

// The tag that `latest` names; nullopt where there is no such file. FormatError for one that names
// something outside.
std::optional<std::string> latest_tag(const std::string& folder);

// Where the checkpoint with this tag lies: its own folder, or that of an old one whose writer was
// killed while it was replaced. nullopt: nowhere; a folder that is a link is not followed.
std::optional<std::string> find_checkpoint(const std::string& folder, const std::string& tag);

// Tags of the checkpoints that have a manifest, the oldest first.
std::vector<std::string> whole_checkpoints(const std::string& folder);

// Whether the folder itself is a training checkpoint, whole or damaged.
bool has_manifest(const std::string& folder);
// Whether that, or a folder of training checkpoints, lies there.
bool holds_checkpoints(const std::string& path);

// The training checkpoint that a path of a user names.
struct ChosenCheckpoint {
  std::string path;               // with the manifest
  std::vector<std::string> tags;  // whole ones beside it, oldest first; none if it was named itself
  std::string latest;             // the tag that `latest` names; empty: there is no such file
};
// The folder itself, or the one that `latest` names where it is a folder of several. UsageError for
// a path that is no folder; FormatError for a folder that holds no checkpoint.
ChosenCheckpoint choose_checkpoint(const std::string& path);

struct NewCheckpointOptions {
  bool latest = true;  // `latest` names it afterwards
  int keep = 0;        // how many whole ones stay, this one and that of `latest` among them; 0: all
};

class NewCheckpoint : NonCopyable {
 public:
  // Makes the folder if need be and takes its lock: of two jobs that save into one folder the
  // second fails. Removes the files of a killed save. A file or folder of the tag's name without a
  // manifest is refused here, and again before it would be replaced.
  NewCheckpoint(std::string folder, std::string tag, io::FolderCalls& calls);
  ~NewCheckpoint();

  const std::string& staging() const { return staging_; }  // where the files go meanwhile
  // A small file of the checkpoint, brought to disk.
  void write_text(const std::string& name, std::string_view text, io::IoEngine& io);
  // The files are on disk: writes the manifest and gives the folder its name. An old checkpoint
  // that cannot be removed afterwards is no error: the next save tries again.
  void publish(const format::Manifest& manifest, const NewCheckpointOptions& options,
               io::IoEngine& io);

 private:
  void recover_replaced();
  void take_place();
  void put_text(const std::string& path, std::string_view text, io::IoEngine& io);

  std::string folder_;
  std::string tag_;
  io::FolderCalls& calls_;
  io::FileLock lock_;
  pid_t owner_;  // the process that writes
  std::string staging_;
};

}  // namespace strata::checkpoint
