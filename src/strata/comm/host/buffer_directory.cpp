#include "strata/comm/host/buffer_directory.h"

namespace strata::comm {

std::optional<std::size_t> BufferDirectory::insert(std::uint64_t id, BufferRange place) {
  const std::size_t used = used_.load(std::memory_order_relaxed);
  std::size_t at = 0;
  while (at < used && slots_[at].id.load(std::memory_order_relaxed) != 0) ++at;
  if (at == kDirectorySlots) return std::nullopt;
  write(slots_[at], id, place);
  if (at == used) used_.store(used + 1, std::memory_order_release);
  changes_.fetch_add(1, std::memory_order_release);
  return at;
}

void BufferDirectory::erase(std::size_t slot) {
  write(slots_[slot], 0, {});
  changes_.fetch_add(1, std::memory_order_release);
}

// Release stores of the fields keep the odd version before them, and acquire loads of the fields
// keep the second look at the version behind them.
void BufferDirectory::write(Slot& slot, std::uint64_t id, BufferRange place) {
  const std::uint32_t version = slot.version.load(std::memory_order_relaxed);
  slot.version.store(version + 1, std::memory_order_relaxed);
  slot.id.store(id, std::memory_order_release);
  slot.offset.store(place.offset, std::memory_order_release);
  slot.bytes.store(place.bytes, std::memory_order_release);
  slot.version.store(version + 2, std::memory_order_release);
}

std::optional<BufferRange> BufferDirectory::find(std::uint64_t id) const {
  const std::size_t used = used_.load(std::memory_order_acquire);
  for (std::size_t at = 0; at < used; ++at) {
    const Slot& slot = slots_[at];
    if (slot.id.load(std::memory_order_relaxed) != id) continue;
    const std::uint32_t version = slot.version.load(std::memory_order_acquire);
    const std::uint64_t found = slot.id.load(std::memory_order_acquire);
    const BufferRange place{slot.offset.load(std::memory_order_acquire),
                            slot.bytes.load(std::memory_order_acquire)};
    const bool steady = version % 2 == 0 && slot.version.load(std::memory_order_relaxed) == version;
    if (steady && found == id) return place;
  }
  return std::nullopt;
}

}  // namespace strata::comm
