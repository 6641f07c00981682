// Which training checkpoint a path means: a folder with a manifest, or a folder of such folders, in
// which the file `latest` names one (format/checkpoint_folder.h). What lies in it is opened only
// where it is: a link that leads out of the folder is refused.
//
// Values; safe everywhere. Errors: UsageError for a path that is no folder; FormatError for a
// folder that holds no checkpoint, or whose files are not what they should be.
#pragma once

#include <string>
#include <vector>

#include "strata/format/manifest.h"
#include "strata/io/file.h"

namespace strata::cli {

struct ChosenCheckpoint {
  std::string path;               // with the manifest
  std::vector<std::string> tags;  // of whole checkpoints beside it, the oldest first; none where it
                                  // was named itself
  std::string latest;             // the tag that `latest` names; empty: there is no such file
};

// Whether the folder itself is a training checkpoint, whole or damaged.
bool has_manifest(const std::string& folder);
// Whether that, or a folder of training checkpoints, lies there.
bool holds_checkpoints(const std::string& path);

// Which one is meant; the one that `latest` names where it is a folder of several.
ChosenCheckpoint choose_checkpoint(const std::string& path);

// A file of a checkpoint, by its name in the manifest. `bytes`: that it must have.
io::File open_checkpoint_file(const std::string& folder, const std::string& name, Bytes bytes);

// All of them, in the manifest's order.
std::vector<io::File> open_checkpoint_files(const std::string& folder,
                                            const format::Manifest& manifest);

}  // namespace strata::cli
