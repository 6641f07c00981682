#include "comm/file_bootstrap.h"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <optional>
#include <span>
#include <sstream>
#include <thread>
#include <utility>

#include "strata/base/error.h"
#include "strata/io/folder_calls.h"
#include "strata/io/pending_range.h"

namespace strata::comm {
namespace {

using Clock = std::chrono::steady_clock;

std::optional<std::string> read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return std::move(text).str();
}

// Text in a file beside `path`, closed, so that other hosts see all of it. It goes with this
// object.
class Temporary {
 public:
  Temporary(const std::string& path, const std::string& text) : path_(io::temporary_name(path)) {
    io::File file(path_, io::File::Mode::kCreateNew);
    try {
      io::write_fully(file, Bytes(), std::as_bytes(std::span(text)));
    } catch (...) {
      ::unlink(path_.c_str());
      throw;
    }
  }
  ~Temporary() { ::unlink(path_.c_str()); }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
};

}  // namespace

FileBootstrap::FileBootstrap(std::filesystem::path directory, int rank, int world_size,
                             std::chrono::milliseconds timeout)
    : directory_(std::move(directory)), rank_(rank), world_size_(world_size), timeout_(timeout) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw UsageError(
        fmt::format("a rank lies in [0, world size) (rank {}, world size {})", rank, world_size));
  }
  std::error_code error;
  std::filesystem::create_directories(directory_, error);
  if (error) {
    throw IoError(fmt::format("cannot create the directory for the ranks to meet in ({}: {})",
                              directory_.string(), error.message()));
  }
}

std::filesystem::path FileBootstrap::path_of(std::uint64_t exchange, int rank) const {
  return directory_ / fmt::format("exchange-{}-rank-{}-of-{}", exchange, rank, world_size_);
}

std::vector<std::string> FileBootstrap::exchange(const std::string& text) {
  write_own(text);
  std::vector<std::string> texts = read_all();
  // Everybody has come here, so everybody has read the files of the exchange before.
  if (exchanges_ > 0) ::unlink(path_of(exchanges_ - 1, rank_).c_str());
  ++exchanges_;
  return texts;
}

void FileBootstrap::write_own(const std::string& text) {
  const std::string path = path_of(exchanges_, rank_).string();
  const Temporary temporary(path, text);
  // A link appears whole, and fails where a rename would replace another start's file.
  if (::link(temporary.path().c_str(), path.c_str()) == 0) return;
  const int code = errno;
  if (code == EEXIST) {
    throw CommError(
        fmt::format("two starts, or two ranks of one number, met in one directory: give "
                    "each start an empty one ({} exists)",
                    path));
  }
  throw IoError(fmt::format("cannot write for the other ranks ({}: {})", path, errno_text(code)));
}

std::vector<std::string> FileBootstrap::read_all() {
  std::vector<std::optional<std::string>> texts(static_cast<std::size_t>(world_size_));
  const Clock::time_point start = Clock::now();
  std::chrono::milliseconds pause{1};
  for (;;) {
    std::vector<int> missing;
    for (int r = 0; r < world_size_; ++r) {
      std::optional<std::string>& text = texts[static_cast<std::size_t>(r)];
      if (!text) text = read_file(path_of(exchanges_, r));
      if (!text) missing.push_back(r);
    }
    if (missing.empty()) break;
    if (Clock::now() - start >= timeout_) {
      throw CommError(fmt::format(
          "ranks did not come to meet the others: look at their output, and check that all were "
          "given this directory and this world size (missing: {} of {}; directory {}; timeout {} "
          "s)",
          fmt::join(missing, ", "), world_size_, directory_.string(),
          std::chrono::duration<double>(timeout_).count()));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(50));
  }
  std::vector<std::string> result;
  for (std::optional<std::string>& text : texts) result.push_back(*std::move(text));
  return result;
}

}  // namespace strata::comm
