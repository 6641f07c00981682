#include "strata/memory/mapped_memory.h"

#include <fmt/core.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "strata/base/errno_text.h"
#include "strata/base/error.h"

namespace strata::memory {
namespace {

// The kernel maps no empty range.
std::size_t mapped_size(std::size_t bytes) {
  return std::max<std::size_t>(bytes, 1);
}

}  // namespace

MappedMemory MappedMemory::map(int protection, int flags, int fd, Bytes offset, Bytes bytes,
                               std::string_view purpose) {
  void* address = ::mmap(nullptr, mapped_size(bytes.size()), protection, flags, fd, offset.value);
  if (address == MAP_FAILED) {
    throw OutOfMemoryError(
        fmt::format("cannot map memory for {}: free some, or use more ranks ({} wanted; {})",
                    purpose, to_string(bytes), errno_text(errno)));
  }
  // A hint: fewer page faults where the system allows huge pages.
  if (bytes >= 2_MiB) ::madvise(address, bytes.size(), MADV_HUGEPAGE);
  return MappedMemory({static_cast<std::byte*>(address), bytes.size()});
}

MappedMemory MappedMemory::anonymous(Bytes bytes, std::string_view purpose) {
  return map(PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, Bytes(0),
             bytes, purpose);
}

MappedMemory MappedMemory::of_file(int fd, Bytes offset, Bytes bytes, Access access,
                                   std::string_view purpose) {
  const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  return map(protection, MAP_SHARED, fd, offset, bytes, purpose);
}

void MappedMemory::give_back() const {
  if (!bytes_.empty()) ::madvise(bytes_.data(), bytes_.size(), MADV_DONTNEED);
}

MappedMemory::MappedMemory(MappedMemory&& other) noexcept
    : bytes_(std::exchange(other.bytes_, {})) {}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedMemory::~MappedMemory() {
  if (bytes_.data() != nullptr) ::munmap(bytes_.data(), mapped_size(bytes_.size()));
}

}  // namespace strata::memory
