#include "strata/checkpoint/folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <set>
#include <span>
#include <system_error>
#include <utility>

#include "strata/base/error.h"
#include "strata/format/safetensors.h"
#include "strata/io/pending_range.h"

namespace strata::checkpoint {
namespace {

namespace fs = std::filesystem;

using format::first_ten;
using format::in_quotes;
using format::is_plain_file_name;
using format::kManifestName;

constexpr std::string_view kLatest = "latest";
constexpr std::string_view kLock = ".strata.lock";
constexpr std::string_view kReplaced = ".replaced";

std::string joined(const std::string& folder, std::string_view name) {
  return fmt::format("{}/{}", folder, name);
}

// The old one of a tag, while a new one takes its name.
std::string replaced_path(const std::string& folder, std::string_view tag) {
  return fmt::format("{}/.{}{}", folder, tag, kReplaced);
}

std::string temporary_path(const std::string& folder, std::string_view name) {
  return io::temporary_name(fmt::format("{}/.{}", folder, name));
}

// Follows no link.
fs::file_status status_of(const std::string& path) {
  std::error_code error;
  return fs::symlink_status(path, error);
}

// Whether a folder is a checkpoint; a link to one is not.
bool is_checkpoint(const std::string& path) {
  return fs::is_directory(status_of(path)) &&
         fs::is_regular_file(status_of(joined(path, kManifestName)));
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

// Whatever has the tag's name is replaced; only a checkpoint may be.
void require_replaceable(const std::string& folder, const std::string& tag) {
  const std::string path = joined(folder, tag);
  if (!fs::exists(status_of(path)) || is_checkpoint(path)) return;
  throw UsageError(
      "something else has the name of the checkpoint's folder, and saving would remove it: it has "
      "no {}. Give another tag, or move it away: path={}",
      kManifestName, path);
}

// The folders survive a power failure, as the files saved in them do.
void make_with_parents(const std::string& folder, io::FolderCalls& calls) {
  std::vector<fs::path> missing;
  std::error_code error;
  for (fs::path path = folder; !path.empty() && !fs::exists(path, error); path = path.parent_path())
    missing.push_back(path);
  for (; !missing.empty(); missing.pop_back()) {
    try {
      calls.make_folder(missing.back());
    } catch (const IoError&) {
      if (!fs::is_directory(missing.back(), error)) throw;  // else another process was quicker
    }
    calls.sync_folder(missing.back().parent_path());
  }
  if (fs::is_directory(folder, error)) return;
  throw IoError("checkpoints are saved into a folder; a file has the name, give another: path={}",
                folder);
}

io::FileLock lock_of(const std::string& folder) {
  const std::string path = joined(folder, kLock);
  FileDescriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!file.valid()) {
    const int code = errno;
    throw IoError("cannot write into the folder of the checkpoints: path={} {}", path,
                  errno_text(code));
  }
  io::FileLock lock(std::move(file));
  const io::FileLock::Outcome outcome = lock.take();
  const int code = errno;
  if (outcome == io::FileLock::Outcome::kHeldElsewhere)
    throw IoError(
        "another process is saving a checkpoint into this folder; give each job a folder of its "
        "own: path={}",
        folder);
  if (outcome == io::FileLock::Outcome::kFailed)
    throw IoError("cannot lock the folder of the checkpoints: path={} {}", path, errno_text(code));
  return lock;
}

}  // namespace

void require_tag(std::string_view tag) {
  if (is_plain_file_name(tag) && tag != kLatest) return;
  throw UsageError(
      "the tag of a checkpoint is the name of a folder: give one without '/' and '\\', that does "
      "not begin with '.', is not 'latest' and has 1 to 200 characters; found {}",
      in_quotes(tag));
}

std::optional<std::string> latest_tag(const std::string& folder) {
  const std::string path = joined(folder, kLatest);
  std::error_code error;
  if (!fs::exists(path, error)) return std::nullopt;
  const io::File file(path, io::File::Mode::kRead);
  std::string text(std::min(file.size(), 4_KiB).size(), '\0');
  io::read_fully(file, Bytes(), std::as_writable_bytes(std::span(text)));
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  if (is_plain_file_name(text)) return text;
  throw FormatError(
      "the file '{}' names no checkpoint of its folder; found {}; give the tag of one: path={}",
      kLatest, in_quotes(text), path);
}

std::optional<std::string> find_checkpoint(const std::string& folder, const std::string& tag) {
  require_tag(tag);
  for (std::string path : {joined(folder, tag), replaced_path(folder, tag)}) {
    if (is_checkpoint(path)) return path;
  }
  return std::nullopt;
}

std::vector<std::string> whole_checkpoints(const std::string& folder) {
  std::set<std::pair<fs::file_time_type, std::string>> found;
  for (const std::string& name : names_in(folder)) {
    const std::string path = joined(folder, name);
    if (!is_plain_file_name(name) || !is_checkpoint(path)) continue;
    std::error_code error;
    found.emplace(fs::last_write_time(joined(path, kManifestName), error), name);
  }
  std::vector<std::string> tags;
  for (const auto& [time, name] : found) tags.push_back(name);
  return tags;
}

bool has_manifest(const std::string& folder) {
  return status_of(joined(folder, kManifestName)).type() != fs::file_type::not_found;
}

bool holds_checkpoints(const std::string& path) {
  std::error_code error;
  return fs::is_directory(path, error) &&
         (has_manifest(path) || latest_tag(path) || !whole_checkpoints(path).empty());
}

ChosenCheckpoint choose_checkpoint(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error))
    throw UsageError("there is no such folder; give that of a training checkpoint: path={} ({})",
                     path, fs::exists(path, error) ? "is a file" : "is not there");
  if (has_manifest(path)) return {path, {}, ""};
  ChosenCheckpoint chosen{"", whole_checkpoints(path), latest_tag(path).value_or("")};
  const std::string listed = chosen.tags.empty() ? "none" : first_ten(chosen.tags);
  if (chosen.latest.empty())
    throw FormatError(
        "a folder is no training checkpoint of Strata: there is neither {} nor 'latest' in it (a "
        "save that did not end has neither); checkpoints in it: {}: path={}",
        kManifestName, listed, path);
  const auto found = find_checkpoint(path, chosen.latest);
  if (!found)
    throw FormatError(
        "'latest' names {}, which holds no {}: it was not saved by Strata, or is gone; whole "
        "checkpoints beside it: {}: path={}",
        in_quotes(chosen.latest), kManifestName, listed, path);
  chosen.path = *found;
  return chosen;
}

NewCheckpoint::NewCheckpoint(std::string folder, std::string tag, io::FolderCalls& calls)
    : folder_(std::move(folder)), tag_(std::move(tag)), calls_(calls), owner_(::getpid()) {
  require_tag(tag_);
  make_with_parents(folder_, calls_);
  lock_ = lock_of(folder_);
  recover_replaced();
  require_replaceable(folder_, tag_);
  for (const std::string& name : names_in(folder_)) {
    const bool leftover = name.starts_with('.') && io::AtomicFile::target_of(name) != name;
    if (leftover) calls_.remove_tree(joined(folder_, name));
  }
  const std::string made = temporary_path(folder_, tag_);
  calls_.make_folder(made);
  staging_ = made;
}

NewCheckpoint::~NewCheckpoint() {
  if (staging_.empty() || owner_ != ::getpid()) return;
  FirstError dropped;  // the next save tries again
  dropped.attempt([this] { calls_.remove_tree(staging_); });
}

// A save was killed between the two renames of a file system that cannot exchange names.
void NewCheckpoint::recover_replaced() {
  bool changed = false;
  for (const std::string& name : names_in(folder_)) {
    if (!name.starts_with('.') || !name.ends_with(kReplaced)) continue;
    const std::string tag = name.substr(1, name.size() - 1 - kReplaced.size());
    const std::string path = joined(folder_, name);
    if (!is_plain_file_name(tag) || !fs::is_directory(status_of(path))) continue;
    if (is_checkpoint(joined(folder_, tag))) {
      calls_.remove_tree(path);
    } else if (!fs::exists(status_of(joined(folder_, tag)))) {
      calls_.rename(path, joined(folder_, tag));
    } else {
      continue;  // another program's; a save under this tag is an error
    }
    changed = true;
  }
  if (changed) calls_.sync_folder(folder_);
}

void NewCheckpoint::put_text(const std::string& path, std::string_view text, io::IoEngine& io) {
  io::File file = calls_.create(path);
  calls_.reserve(file, Bytes(text.size()));
  if (!text.empty()) io.write(file, Bytes(), std::as_bytes(std::span(text)))->wait();
  calls_.sync_file(file);
  calls_.open_to_others(file);
}

void NewCheckpoint::write_text(const std::string& name, std::string_view text, io::IoEngine& io) {
  STRATA_ASSERT(is_plain_file_name(name));
  put_text(joined(staging_, name), text, io);
}

void NewCheckpoint::publish(const format::Manifest& manifest, const NewCheckpointOptions& options,
                            io::IoEngine& io) {
  write_text(std::string(kManifestName), to_text(manifest), io);
  calls_.sync_folder(staging_);
  take_place();
  calls_.sync_folder(folder_);
  if (options.latest) {
    const std::string written = temporary_path(folder_, kLatest);
    try {
      put_text(written, tag_, io);
      calls_.rename(written, joined(folder_, kLatest));
    } catch (const Error&) {
      calls_.remove_tree(written);
      throw;
    }
    calls_.sync_folder(folder_);
  }
  try {
    if (!staging_.empty()) calls_.remove_tree(std::exchange(staging_, {}));
    if (options.keep <= 0) return;
    std::vector<std::string> tags = whole_checkpoints(folder_);
    const std::optional<std::string> latest = latest_tag(folder_);
    auto left = static_cast<std::ptrdiff_t>(tags.size());
    for (const std::string& tag : tags) {
      if (left <= options.keep) break;
      if (tag == tag_ || tag == latest) continue;
      // Not its manifest first: a folder half removed must not look whole.
      const std::string going = temporary_path(folder_, tag);
      calls_.rename(joined(folder_, tag), going);
      calls_.remove_tree(going);
      --left;
    }
  } catch (const std::exception&) {
    // Old checkpoints cost space and nothing else.
  }
}

void NewCheckpoint::take_place() {
  const std::string path = joined(folder_, tag_);
  require_replaceable(folder_, tag_);  // it may have come while files were written
  if (!fs::exists(status_of(path))) {
    calls_.rename(staging_, path);
    staging_.clear();
    return;
  }
  if (calls_.exchange(staging_, path)) return;  // what is called staging now is the old one
  const std::string replaced = replaced_path(folder_, tag_);
  calls_.rename(path, replaced);
  calls_.rename(staging_, path);
  staging_ = replaced;
}

}  // namespace strata::checkpoint
