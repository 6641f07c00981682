// A vector whose elements begin at a page, as the engine's buffers do: a vector of the standard
// allocator begins 16 bytes past one, and each of its 64-byte loads touches two cache lines.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace strata::bench {

template <typename T>
struct PageAllocator {
  using value_type = T;
  static constexpr std::align_val_t kPage{4096};

  PageAllocator() = default;
  template <typename Other>
  explicit PageAllocator(const PageAllocator<Other>&) {}

  T* allocate(std::size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), kPage));
  }
  void deallocate(T* memory, std::size_t) { ::operator delete(memory, kPage); }
  bool operator==(const PageAllocator&) const = default;
};

using PageVector = std::vector<float, PageAllocator<float>>;

}  // namespace strata::bench
