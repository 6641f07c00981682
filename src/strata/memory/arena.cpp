#include "strata/memory/arena.h"

#include <cstdint>
#include <mutex>
#include <utility>

#include "strata/base/error.h"
#include "strata/memory/offset_allocator.h"

namespace strata::memory {

struct Extent::Home {
  Home(std::span<std::byte> span, Bytes granule)
      : memory(span), offsets(Bytes(span.size()), granule) {}

  const std::span<std::byte> memory;
  std::mutex mutex;
  OffsetAllocator offsets;  // guarded by mutex
};

namespace {

bool is_multiple(const std::byte* address, Bytes alignment) {
  return reinterpret_cast<std::uintptr_t>(address) % alignment.size() == 0;
}

}  // namespace

Extent::Extent(std::shared_ptr<Home> home, Bytes offset, std::span<std::byte> bytes)
    : home_(std::move(home)), offset_(offset), bytes_(bytes) {}

Extent::Extent(Extent&& other) noexcept
    : home_(std::exchange(other.home_, nullptr)),
      offset_(other.offset_),
      bytes_(std::exchange(other.bytes_, {})) {}

Extent& Extent::operator=(Extent&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  home_ = std::exchange(other.home_, nullptr);
  offset_ = other.offset_;
  bytes_ = std::exchange(other.bytes_, {});
  return *this;
}

Extent::~Extent() {
  give_back();
}

void Extent::give_back() noexcept {
  if (!home_) return;
  const std::lock_guard lock(home_->mutex);
  home_->offsets.release(offset_);
}

Arena::Arena(std::span<std::byte> memory, Bytes granule)
    : home_(std::make_shared<Extent::Home>(memory, granule)) {
  STRATA_ASSERT(is_multiple(memory.data(), granule));
}

std::optional<Extent> Arena::try_allocate(Bytes bytes, Bytes alignment) {
  STRATA_ASSERT(alignment.value > 0 && is_multiple(home_->memory.data(), alignment));
  const std::lock_guard lock(home_->mutex);
  const auto offset = home_->offsets.try_allocate(bytes, alignment);
  if (!offset) return std::nullopt;
  return Extent(home_, *offset, home_->memory.subspan(offset->size(), bytes.size()));
}

Bytes Arena::capacity() const {
  return home_->offsets.capacity();
}

Bytes Arena::in_use() const {
  const std::lock_guard lock(home_->mutex);
  return home_->offsets.in_use();
}

Bytes Arena::largest_free() const {
  const std::lock_guard lock(home_->mutex);
  return home_->offsets.largest_free();
}

double Arena::fragmentation() const {
  const std::lock_guard lock(home_->mutex);
  return home_->offsets.fragmentation();
}

}  // namespace strata::memory
