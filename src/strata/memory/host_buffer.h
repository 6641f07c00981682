// A page-aligned buffer of host memory of its own, zeroed by the kernel: an anonymous mapping.
// Pages take memory when first touched, unless the options touch them all at once.
// Threads: as a std::vector: const calls from anywhere; the user synchronises the bytes. Ownership:
// the buffer owns the mapping and frees it on destruction; movable, addresses stay. Units: exactly
// the requested bytes are charged; the rounding up to whole pages is not. Errors: OutOfMemoryError
// with the bytes wanted and the ledger's report. The system commonly promises more memory than it
// has, so a buffer that is not touched now may fail only when it is used; Device::free_bytes
// reports the real rest.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

#include "strata/base/units.h"
#include "strata/memory/ledger.h"

namespace strata {
class ThreadPool;
}

namespace strata::memory {

// One mapping of memory, unmapped by the destructor. Page-aligned; zeroed if it is new. Threads:
// immutable after construction. Errors: OutOfMemoryError, which names the purpose.
class MappedMemory {
 public:
  enum class Access { kRead, kReadWrite };

  // Private memory of this process. `purpose` is for the error.
  static MappedMemory anonymous(Bytes bytes, std::string_view purpose);
  // Shared pages of a file; `offset` is a multiple of the page size.
  static MappedMemory of_file(int fd, Bytes offset, Bytes bytes, Access access,
                              std::string_view purpose);

  MappedMemory() = default;  // nothing
  // Takes over a mapping, which begins at a page.
  explicit MappedMemory(std::span<std::byte> bytes) : memory_(bytes.data(), Unmap{bytes.size()}) {}

  std::span<std::byte> bytes() const {
    return memory_ ? std::span(memory_.get(), memory_.get_deleter().bytes) : std::span<std::byte>();
  }
  // Only for anonymous() memory: gives its pages back to the system. A later access gets new,
  // zeroed pages.
  void give_back() const;

 private:
  static MappedMemory map(int protection, int flags, int fd, Bytes offset, Bytes bytes,
                          std::string_view purpose);

  struct Unmap {
    std::size_t bytes;
    void operator()(std::byte* memory) const noexcept;
  };
  std::unique_ptr<std::byte, Unmap> memory_;  // null: nothing to unmap
};

// The system's page size. Buffers are aligned to it at least.
Bytes page_size();

// Gives the pages that lie wholly in `bytes` back to the system. Their values are lost; the address
// range stays its owner's. Works in small steps: one call that freed gigabytes would keep every
// other thread of the process from mapping or unmapping memory until it ends.
void give_back_pages(std::span<std::byte> bytes) noexcept;

// 2 MiB. Larger buffers that ask for huge pages are aligned to it.
inline constexpr Bytes kHugePageSize = 2_MiB;

struct HostBufferOptions {
  std::shared_ptr<Ledger> ledger = nullptr;  // null: charged nowhere
  Tier tier = Tier::kHost;                   // a CPU device charges its memory as the device's
  Kind kind = Kind::kStaging;
  bool huge_pages = true;       // advise huge pages when the buffer holds at least one
  ThreadPool* touch = nullptr;  // back every page now, with these threads
};

class HostBuffer {
 public:
  HostBuffer() = default;  // 0 bytes
  explicit HostBuffer(Bytes bytes, const HostBufferOptions& options = {});

  std::byte* data() { return memory_.bytes().data(); }
  const std::byte* data() const { return memory_.bytes().data(); }
  Bytes size() const { return Bytes(memory_.bytes().size()); }
  std::span<std::byte> bytes() { return memory_.bytes(); }
  std::span<const std::byte> bytes() const { return memory_.bytes(); }

 private:
  void touch(ThreadPool& pool);

  Charge charge_;
  MappedMemory memory_;  // nothing when the size is 0
};

}  // namespace strata::memory
