// One mapping of memory, unmapped by the destructor. Page-aligned; zeroed if it is new. Threads:
// immutable after construction. Errors: OutOfMemoryError, which names the purpose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "strata/base/units.h"

namespace strata::memory {

class MappedMemory {
 public:
  enum class Access { kRead, kReadWrite };

  // Private memory of this process. `purpose` is for the error.
  static MappedMemory anonymous(Bytes bytes, std::string_view purpose);
  // Shared pages of a file; `offset` is a multiple of the page size.
  static MappedMemory of_file(int fd, Bytes offset, Bytes bytes, Access access,
                              std::string_view purpose);

  MappedMemory() = default;  // nothing
  MappedMemory(MappedMemory&& other) noexcept;
  MappedMemory& operator=(MappedMemory&& other) noexcept;
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;
  ~MappedMemory();

  std::span<std::byte> bytes() const { return bytes_; }
  // Only for anonymous() memory: gives its pages back to the system. A later access gets new,
  // zeroed pages.
  void give_back() const;

 private:
  explicit MappedMemory(std::span<std::byte> bytes) : bytes_(bytes) {}
  static MappedMemory map(int protection, int flags, int fd, Bytes offset, Bytes bytes,
                          std::string_view purpose);

  std::span<std::byte> bytes_;  // data() is null when there is nothing to unmap
};

}  // namespace strata::memory
