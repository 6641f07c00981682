#include "strata/memory/page_sharing.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>

#include "strata/base/file_descriptor.h"

namespace strata::memory {
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
