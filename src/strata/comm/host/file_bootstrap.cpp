#include "strata/comm/host/file_bootstrap.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "strata/base/error.h"

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
  const std::filesystem::path path = path_of(exchanges_, rank_);
  const std::filesystem::path temporary = path.string() + fmt::format(".{}", ::getpid());
  {
    std::ofstream file(temporary, std::ios::binary);
    file << text;
    file.flush();
    if (!file) {
      throw IoError(fmt::format("cannot write for the other ranks ({}: {})", temporary.string(),
                                std::strerror(errno)));
    }
  }
  // A link appears whole, and fails where a rename would replace another start's file.
  const int failed = ::link(temporary.c_str(), path.c_str()) == 0 ? 0 : errno;
  ::unlink(temporary.c_str());
  if (failed == EEXIST) {
    throw CommError(
        fmt::format("two starts, or two ranks of one number, met in one directory: give "
                    "each start an empty one ({} exists)",
                    path.string()));
  }
  if (failed != 0) {
    throw IoError(fmt::format("cannot write for the other ranks ({}: {})", path.string(),
                              std::strerror(failed)));
  }
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
