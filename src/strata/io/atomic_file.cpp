#include "strata/io/atomic_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <random>
#include <span>
#include <utility>

#include "strata/base/error.h"
#include "strata/io/folder_calls.h"
#include "strata/io/pending_range.h"

namespace strata::io {
namespace {

constexpr std::string_view kSuffix = ".partial";
constexpr std::size_t kDigits = 16;
}  // namespace

std::string temporary_name(const std::string& path) {
  std::random_device random;  // the kernel's
  const std::uint64_t number = (std::uint64_t{random()} << 32U) | random();
  return fmt::format("{}.{:016x}{}", path, number, kSuffix);
}

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)), file_(temporary_name(path_), File::Mode::kCreateNew) {}

AtomicFile::~AtomicFile() {
  if (!published_) ::unlink(file_.path().c_str());
}

void AtomicFile::seal() {
  file_.sync();
  sealed_ = true;
}

void AtomicFile::publish() {
  if (!sealed_) seal();
  KernelFolderCalls calls;
  calls.open_to_others(file_);
  calls.rename(file_.path(), path_);
  published_ = true;
  calls.sync_folder(std::filesystem::path(path_).parent_path().string());
}

std::string_view AtomicFile::target_of(std::string_view name) {
  if (!name.ends_with(kSuffix)) return name;
  std::string_view target = name.substr(0, name.size() - kSuffix.size());
  if (target.size() <= kDigits + 1 || target[target.size() - kDigits - 1] != '.') return name;
  const std::string_view digits = target.substr(target.size() - kDigits);
  if (digits.find_first_not_of("0123456789abcdef") != std::string_view::npos) return name;
  return target.substr(0, target.size() - kDigits - 1);
}

void write_file_atomically(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  write_fully(file.file(), Bytes(), std::as_bytes(std::span(text)));
  file.publish();
}

bool remove_file(const std::string& path) {
  if (::unlink(path.c_str()) == 0) return true;
  const int code = errno;
  if (code == ENOENT) return false;
  throw IoError(fmt::format("cannot remove a file: path={} {}", path, errno_text(code)));
}

}  // namespace strata::io
