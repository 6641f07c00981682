#include "strata/memory/host_buffer.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

#include "strata/base/error.h"
#include "strata/base/file_descriptor.h"
#include "strata/base/thread_pool.h"

namespace strata::memory {
namespace {

// The kernel maps no empty range.
std::size_t mapped_size(std::size_t bytes) {
  return std::max<std::size_t>(bytes, 1);
}

[[noreturn]] void throw_out_of_memory(Bytes wanted, const HostBufferOptions& options, int error) {
  throw OutOfMemoryError(
      "no memory for a buffer of the {} tier ({}): {} wanted, the system refused it ({}); free "
      "memory or raise the limits of this process (ulimit -v, vm.overcommit_memory, "
      "vm.max_map_count); held: {}",
      name_of(options.tier), name_of(options.kind), to_string(wanted), errno_text(error),
      options.ledger ? options.ledger->report() : "not counted");
}

Bytes address_of(const std::byte* memory) {
  return Bytes(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(memory)));
}

Bytes whole_pages(Bytes bytes) {
  return align_up(bytes, page_size());
}

// Null when the system refuses; errno says why.
std::byte* map_pages(Bytes bytes) {
  void* address = ::mmap(nullptr, bytes.size(), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : static_cast<std::byte*>(address);
}

void unmap_pages(std::byte* address, Bytes bytes) noexcept {
  if (bytes.value > 0) ::munmap(address, bytes.size());
}

// Maps one huge page more than asked for and gives back what lies before and after the aligned
// part.
std::byte* map_huge_pages(Bytes bytes) {
  std::byte* const mapped = map_pages(bytes + kHugePageSize);
  if (mapped == nullptr) return nullptr;
  const Bytes before = align_up(address_of(mapped), kHugePageSize) - address_of(mapped);
  std::byte* const aligned = mapped + before.size();
  unmap_pages(mapped, before);
  unmap_pages(aligned + bytes.size(), kHugePageSize - before);
  // Advice: where huge pages are off, small ones serve.
  ::madvise(aligned, bytes.size(), MADV_HUGEPAGE);
  return aligned;
}

// Backs the pages of [begin, begin + bytes). Returns 0 or an errno.
int populate(std::byte* begin, Bytes bytes) {
#ifdef MADV_POPULATE_WRITE
  if (::madvise(begin, bytes.size(), MADV_POPULATE_WRITE) == 0) return 0;
  if (errno == ENOMEM || errno == EFAULT || errno == EHWPOISON) return errno;
#endif
  // The kernel does not know this advice: a write to each page does the same.
  for (Bytes at; at < bytes; at += page_size())
    *const_cast<volatile std::byte*>(begin + at.size()) = std::byte{0};
  return 0;
}

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

constexpr std::size_t kSamples = 256;
constexpr std::size_t kFew = 16;  // shared ones of them that do not matter
// Bits of an entry of /proc/PID/pagemap.
constexpr std::uint64_t kExclusive = std::uint64_t{1} << 56U;
constexpr std::uint64_t kOfFile = std::uint64_t{1} << 61U;
constexpr std::uint64_t kPresent = std::uint64_t{1} << 63U;

bool is_shared(int pagemap, std::uintptr_t address) {
  std::uint64_t entry = 0;
  const auto at = static_cast<off_t>(address / page_size().size() * sizeof(entry));
  if (::pread(pagemap, &entry, sizeof(entry), at) != static_cast<ssize_t>(sizeof(entry)))
    return false;
  return (entry & kPresent) != 0 && (entry & (kExclusive | kOfFile)) == 0;
}

}  // namespace

MappedMemory MappedMemory::of_file(int fd, Bytes offset, Bytes bytes, Access access,
                                   std::string_view purpose) {
  const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* address =
      ::mmap(nullptr, mapped_size(bytes.size()), protection, MAP_SHARED, fd, offset.value);
  if (address == MAP_FAILED)
    throw OutOfMemoryError("cannot map memory for {}: free some, or use more ranks ({} wanted; {})",
                           purpose, to_string(bytes), errno_text(errno));
  // A hint: fewer page faults where the system allows huge pages.
  if (bytes >= 2_MiB) ::madvise(address, bytes.size(), MADV_HUGEPAGE);
  return MappedMemory({static_cast<std::byte*>(address), bytes.size()});
}

void MappedMemory::Unmap::operator()(std::byte* memory) const noexcept {
  ::munmap(memory, mapped_size(bytes));
}

Bytes page_size() {
  static const Bytes size(static_cast<std::int64_t>(::sysconf(_SC_PAGESIZE)));
  return size;
}

void give_back_pages(std::span<std::byte> bytes) noexcept {
  constexpr Bytes kAtOnce = 4_MiB;  // a tenth of a millisecond
  const Bytes first = address_of(bytes.data());
  Bytes at = align_up(first, page_size());
  const Bytes end(address_of(bytes.data() + bytes.size()).value / page_size().value *
                  page_size().value);
  for (; at < end; at += kAtOnce)
    ::madvise(bytes.data() + (at - first).size(), std::min(kAtOnce, end - at).size(),
              MADV_DONTNEED);
}

HostBuffer::HostBuffer(Bytes bytes, const HostBufferOptions& options) {
  STRATA_ASSERT(bytes.value >= 0);
  if (bytes == Bytes()) return;
  // Rounding up, and the page that aligns, must not overflow.
  if (bytes.value > std::numeric_limits<std::int64_t>::max() - 2 * kHugePageSize.value)
    throw_out_of_memory(bytes, options, ENOMEM);
  const bool huge = options.huge_pages && bytes >= kHugePageSize;
  std::byte* const mapped =
      huge ? map_huge_pages(whole_pages(bytes)) : map_pages(whole_pages(bytes));
  if (mapped == nullptr) throw_out_of_memory(bytes, options, errno);
  memory_ = MappedMemory({mapped, bytes.size()});
  try {
    if (options.touch != nullptr) touch(*options.touch);
    charge_ = Charge(options.ledger, options.tier, options.kind, bytes);
  } catch (const OutOfMemoryError&) {
    throw_out_of_memory(bytes, options, ENOMEM);
  }
}

void HostBuffer::touch(ThreadPool& pool) {
  // Chunks of several huge pages: long enough to pay for a call, short enough to share evenly.
  const Bytes grain = kHugePageSize * 8;
  pool.parallel_for(whole_pages(size()).value, grain.value,
                    [this](std::int64_t begin, std::int64_t end) {
                      const int error = populate(data() + begin, Bytes(end - begin));
                      if (error != 0) throw OutOfMemoryError("pages refused");
                    });
}

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

bool shares_pages(std::span<const std::span<const std::byte>> parts,
                  const std::filesystem::path& pages) {
  const FileDescriptor pagemap(::open(pages.c_str(), O_RDONLY | O_CLOEXEC));
  if (!pagemap.valid()) return false;
  std::size_t total = 0;
  for (const auto part : parts) total += part.size();
  std::size_t shared = 0;
  const std::size_t step = total / kSamples + 1;
  std::size_t next = step / 2;  // of all bytes, the one to look at
  for (const auto part : parts) {
    for (; next < part.size(); next += step) {
      const auto address = reinterpret_cast<std::uintptr_t>(part.data() + next);
      if (is_shared(pagemap.get(), address)) ++shared;
    }
    next -= part.size();
  }
  return shared > kFew;
}

}  // namespace strata::memory
