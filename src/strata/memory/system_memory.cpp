#include "strata/memory/system_memory.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "strata/base/file_descriptor.h"

namespace strata::memory {
namespace {

namespace fs = std::filesystem;

constexpr Bytes kUnbounded = Bytes(std::numeric_limits<std::int64_t>::max());

// The names of one version's files: limit, usage, and the statistic that counts droppable file
// cache.
struct GroupFiles {
  const char* limit;
  const char* usage;
  const char* droppable;
};
constexpr GroupFiles kVersion2{"memory.max", "memory.current", "inactive_file"};
constexpr GroupFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes",
                               "total_inactive_file"};

// The number that a file consists of; nullopt for "max" and where there is none.
std::optional<Bytes> read_number(const fs::path& path) {
  std::ifstream file(path);
  std::int64_t value = 0;
  if (!(file >> value)) return std::nullopt;
  return Bytes(value);
}

// The number after `key` in a file of lines "key number ...".
std::optional<std::int64_t> read_keyed(const fs::path& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    std::int64_t value = 0;
    if (words >> word && word == key && words >> value) return value;
  }
  return std::nullopt;
}

Bytes left_of_group(const fs::path& directory, const GroupFiles& files) {
  const auto limit = read_number(directory / files.limit);
  const auto usage = read_number(directory / files.usage);
  if (!limit || !usage) return kUnbounded;
  const Bytes droppable(read_keyed(directory / "memory.stat", files.droppable).value_or(0));
  const Bytes used = std::max(Bytes(), *usage - std::min(*usage, droppable));
  return std::max(Bytes(), *limit - used);
}

// The smallest bound of the group and the groups that hold it, up to the mount. A group that is not
// visible (a container sees its own as the root) has no files and bounds nothing.
Bytes left_of_groups(const fs::path& mount, const fs::path& group, const GroupFiles& files) {
  Bytes left = left_of_group(mount, files);
  fs::path directory = mount;
  for (const fs::path& part : group.relative_path()) {
    directory /= part;
    left = std::min(left, left_of_group(directory, files));
  }
  return left;
}

bool lists_memory(std::string_view controllers) {
  return fmt::format(",{},", controllers).find(",memory,") != std::string::npos;
}

}  // namespace

Bytes available_memory(const fs::path& root) {
  Bytes left = kUnbounded;
  if (const auto kibibytes = read_keyed(root / "proc/meminfo", "MemAvailable:"))
    left = Bytes(*kibibytes) * 1024;
  // Lines are "hierarchy:controllers:path"; version 2 is hierarchy 0 without controllers.
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const fs::path group = line.substr(second + 1);
    if (controllers.empty())
      left = std::min(left, left_of_groups(root / "sys/fs/cgroup", group, kVersion2));
    else if (lists_memory(controllers))
      left = std::min(left, left_of_groups(root / "sys/fs/cgroup/memory", group, kVersion1));
  }
  return left;
}

namespace {

constexpr std::size_t kSamples = 256;
constexpr std::size_t kFew = 16;  // shared ones of them that do not matter
// Bits of an entry of /proc/PID/pagemap.
constexpr std::uint64_t kExclusive = std::uint64_t{1} << 56U;
constexpr std::uint64_t kOfFile = std::uint64_t{1} << 61U;
constexpr std::uint64_t kPresent = std::uint64_t{1} << 63U;

bool is_shared(int pagemap, std::uintptr_t address, std::uintptr_t page_size) {
  std::uint64_t entry = 0;
  const auto at = static_cast<off_t>(address / page_size * sizeof(entry));
  if (::pread(pagemap, &entry, sizeof(entry), at) != static_cast<ssize_t>(sizeof(entry)))
    return false;
  return (entry & kPresent) != 0 && (entry & (kExclusive | kOfFile)) == 0;
}

}  // namespace

bool shares_pages(std::span<const std::span<const std::byte>> parts,
                  const std::filesystem::path& pages) {
  const FileDescriptor pagemap(::open(pages.c_str(), O_RDONLY | O_CLOEXEC));
  if (!pagemap.valid()) return false;
  const auto page_size = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  std::size_t total = 0;
  for (const auto part : parts) total += part.size();
  std::size_t shared = 0;
  const std::size_t step = total / kSamples + 1;
  std::size_t next = step / 2;  // of all bytes, the one to look at
  for (const auto part : parts) {
    for (; next < part.size(); next += step) {
      const auto address = reinterpret_cast<std::uintptr_t>(part.data() + next);
      if (is_shared(pagemap.get(), address, page_size)) ++shared;
    }
    next -= part.size();
  }
  return shared > kFew;
}

}  // namespace strata::memory
