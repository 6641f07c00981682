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
#include <filesystem>
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

  // Shared pages of a file; `offset` is a multiple of the page size. `purpose` is for the error.
  static MappedMemory of_file(int fd, Bytes offset, Bytes bytes, Access access,
                              std::string_view purpose);

  MappedMemory() = default;  // nothing
  // Takes over a mapping, which begins at a page.
  explicit MappedMemory(std::span<std::byte> bytes) : memory_(bytes.data(), Unmap{bytes.size()}) {}

  std::span<std::byte> bytes() const {
    return memory_ ? std::span(memory_.get(), memory_.get_deleter().bytes) : std::span<std::byte>();
  }

 private:
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

// Facts about memory that the system reports. Threads: safe anywhere. Errors: none; if the system
// does not report something, it is taken as unbounded, or as not shared.

// The bytes of host memory that this process may still take without swapping: the kernel's
// available memory, bounded by the rest that every control group (v2 or v1) above the process has.
// File cache that a group could drop counts as free. Other processes change the result at any time.
// `root`: the folder that holds proc/ and sys/; "/" except in tests.
Bytes available_memory(const std::filesystem::path& root = "/");

// Tells whether other processes share many pages of some memory, as after a fork until one of them
// writes. If another process then reads this memory by its address, the system copies the shared
// pages first. Looks at 256 places, spread evenly over all parts; more than 16 must be shared.
// Pages of files do not count: the system never copies them. Pages that were read before their
// first write look shared. `pages`: this process's page map; tests give another.
bool shares_pages(std::span<const std::span<const std::byte>> parts,
                  const std::filesystem::path& pages = "/proc/self/pagemap");

}  // namespace strata::memory
