// A vector whose memory is like the engine's buffers: it begins at a huge page, and consists of
// huge pages if the system grants them on advice. A vector of the standard allocator begins 16
// bytes past a page, and each of its 64-byte loads touches two cache lines.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <vector>

namespace strata::bench {

template <typename T>
struct PageAllocator {
  using value_type = T;
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;

  PageAllocator() = default;
  template <typename Other>
  explicit PageAllocator(const PageAllocator<Other>&) {}

  T* allocate(std::size_t count) {
    const std::size_t bytes = (count * sizeof(T) + kHugePage - 1) / kHugePage * kHugePage;
    void* const memory = ::operator new (bytes, std::align_val_t{kHugePage});
    ::madvise(memory, bytes, MADV_HUGEPAGE);  // a hint
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t) {
    ::operator delete (memory, std::align_val_t{kHugePage});
  }
  bool operator==(const PageAllocator&) const = default;
};

using PageVector = std::vector<float, PageAllocator<float>>;

}  // namespace strata::bench
