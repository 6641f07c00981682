#include "strata/cli/model_files.h"

#include <algorithm>
#include <filesystem>
#include <span>
#include <system_error>

#include "strata/base/error.h"
#include "strata/format/manifest.h"
#include "strata/format/sharded_writer.h"
#include "strata/io/folder_calls.h"
#include "strata/io/pending_range.h"

namespace strata::cli {
namespace {

namespace fs = std::filesystem;

constexpr Bytes kBuffer = 1_MiB;

bool is_of_model(const std::string& name) {
  if (name == format::kManifestName || name == format::kIndexFileName) return false;
  const std::string extension = fs::path(name).extension().string();
  return extension == ".json" || extension == ".txt" || extension == ".jinja" ||
         extension == ".model";
}

// Whole or not at all.
void copy_whole(const std::string& from, const std::string& to) {
  const io::File source(from, io::File::Mode::kRead);
  io::AtomicFile target(to);
  std::vector<std::byte> buffer(kBuffer.size());
  const Bytes end = source.size();
  for (Bytes at; at < end; at += kBuffer) {
    const auto part = std::span(buffer).first(std::min(kBuffer, end - at).size());
    io::read_fully(source, at, part);
    io::write_fully(target.file(), at, part);
  }
  target.publish();
}

}  // namespace

std::vector<std::string> copy_model_files(const std::string& from, const std::string& to) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entry(from, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool regular = fs::is_regular_file(fs::symlink_status(entry->path(), error));
    if (regular && format::is_plain_file_name(name) && is_of_model(name)) names.push_back(name);
  }
  if (error) {
    throw IoError(fmt::format("cannot list a folder: path={} {}", from, errno_text(error.value())));
  }
  std::ranges::sort(names);
  for (const std::string& name : names)
    copy_whole((fs::path(from) / name).string(), (fs::path(to) / name).string());
  return names;
}

}  // namespace strata::cli
