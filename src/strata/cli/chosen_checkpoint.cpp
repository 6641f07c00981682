#include "strata/cli/chosen_checkpoint.h"

#include <filesystem>
#include <system_error>

#include "strata/base/error.h"
#include "strata/checkpoint/folder.h"
#include "strata/format/safetensors.h"

namespace strata::cli {
namespace {

namespace fs = std::filesystem;

bool is_there(const std::string& path) {
  std::error_code error;
  return fs::symlink_status(path, error).type() != fs::file_type::not_found;
}

std::string listed(const std::vector<std::string>& tags) {
  return tags.empty() ? "none" : format::first_ten(tags);
}

}  // namespace

bool has_manifest(const std::string& folder) {
  return is_there(folder + "/" + std::string(format::kManifestName));
}

bool holds_checkpoints(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return false;
  return has_manifest(path) || checkpoint::latest_tag(path) ||
         !checkpoint::whole_checkpoints(path).empty();
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
  chosen.tags = checkpoint::whole_checkpoints(path);
  chosen.latest = checkpoint::latest_tag(path).value_or("");
  if (chosen.latest.empty()) {
    throw FormatError(fmt::format(
        "a folder is no training checkpoint of Strata: there is neither {} nor 'latest' in it (a "
        "save that did not end has neither); checkpoints in it: {}: path={}",
        format::kManifestName, listed(chosen.tags), path));
  }
  const auto found = checkpoint::find_checkpoint(path, chosen.latest);
  if (!found) {
    throw FormatError(fmt::format(
        "'latest' names {}, which holds no {}: it was not saved by Strata, or is gone; "
        "whole checkpoints beside it: {}: path={}",
        format::in_quotes(chosen.latest), format::kManifestName, listed(chosen.tags), path));
  }
  chosen.path = *found;
  return chosen;
}

}  // namespace strata::cli
