#include "strata/checkpoint/chosen_checkpoint.h"

#include <filesystem>
#include <system_error>

#include "strata/base/error.h"
#include "strata/checkpoint/folder.h"
#include "strata/format/manifest.h"
#include "strata/format/safetensors.h"

namespace strata::checkpoint {

namespace fs = std::filesystem;

bool has_manifest(const std::string& folder) {
  std::error_code error;
  return fs::symlink_status(fmt::format("{}/{}", folder, format::kManifestName), error).type() !=
         fs::file_type::not_found;
}

bool holds_checkpoints(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return false;
  return has_manifest(path) || latest_tag(path) || !whole_checkpoints(path).empty();
}

ChosenCheckpoint choose_checkpoint(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    throw UsageError(
        fmt::format("there is no such folder; give that of a training checkpoint: path={} ({})",
                    path, fs::exists(path, error) ? "is a file" : "is not there"));
  }
  if (has_manifest(path)) return {path, {}, ""};
  ChosenCheckpoint chosen;
  chosen.tags = whole_checkpoints(path);
  chosen.latest = latest_tag(path).value_or("");
  const std::string listed = chosen.tags.empty() ? "none" : format::first_ten(chosen.tags);
  if (chosen.latest.empty()) {
    throw FormatError(fmt::format(
        "a folder is no training checkpoint of Strata: there is neither {} nor 'latest' in it (a "
        "save that did not end has neither); checkpoints in it: {}: path={}",
        format::kManifestName, listed, path));
  }
  const auto found = find_checkpoint(path, chosen.latest);
  if (!found) {
    throw FormatError(
        fmt::format("'latest' names {}, which holds no {}: it was not saved by Strata, or is gone; "
                    "whole checkpoints beside it: {}: path={}",
                    format::in_quotes(chosen.latest), format::kManifestName, listed, path));
  }
  chosen.path = *found;
  return chosen;
}

}  // namespace strata::checkpoint
