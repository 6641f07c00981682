// The training checkpoint that a path of a user names: a folder with a manifest, or a folder of
// such folders, in which the file `latest` names one (checkpoint/folder.h).
//
// Values; safe everywhere. Errors: UsageError for a path that is no folder; FormatError for a
// folder that holds no checkpoint.
#pragma once

#include <string>
#include <vector>

namespace strata::checkpoint {

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

}  // namespace strata::checkpoint
