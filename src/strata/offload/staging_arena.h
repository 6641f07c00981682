// The memory through which a rank stages blocks: one allocation of host memory, pinned where the
// device is a GPU, so that drives write into it and kernels work in it. It gives out extents of any
// size and number within its budget. A caller that asks for more than is free waits: the arena asks
// the holders to give way. A holder drops extents that only save it time, or waits for a transfer
// of its own.
//
// No deadlock: one thread does everything, no call waits for later work of another user, and every
// transfer ends. Extents that are held at once are taken in one call. If nothing is leased, that
// call gives any extents that fit into an empty arena. Leases in between may fragment the room:
// then the call may give nothing, and its caller reports that; not to holders that keep to
// lease_share(), since the largest gap between other leases has a share's room.
//
// Threads: one at a time, the thread of the holders. Ownership: an extent keeps the bookkeeping
// alive, but not the memory; so each holder keeps the arena. Units: extents are whole pages of 4
// KiB. Errors: OutOfMemoryError; UsageError for a budget below one page.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/device/device.h"
#include "strata/memory/offset_allocator.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

// Whole pages of an arena; given back by the destructor. Movable.
class Extent {
 public:
  Extent() = default;  // nothing
  Extent(std::shared_ptr<memory::OffsetAllocator> offsets, Bytes offset, std::span<std::byte> bytes)
      : held_(bytes.data(), {std::move(offsets), offset}), size_(bytes.size()) {}
  // Exactly as many as asked for; none where it was moved from.
  std::span<std::byte> bytes() const { return {held_.get(), held_ != nullptr ? size_ : 0}; }

 private:
  struct GiveBack {
    std::shared_ptr<memory::OffsetAllocator> offsets;
    Bytes offset;
    void operator()(std::byte*) const noexcept { offsets->release(offset); }
  };
  std::unique_ptr<std::byte, GiveBack> held_;
  std::size_t size_ = 0;
};

class StagingArena {
 public:
  // The cost for a holder to give way: none; a wait for a write under way; a later read of the
  // bytes.
  enum class Effort { kNone, kWait, kReadAgain };
  // A user of the arena with extents that it can give back early.
  class Holder : public Interface {
   public:
    // Gives an extent back, or comes one step nearer to that. False: it can do nothing with this
    // effort.
    virtual bool free_memory(Effort effort) = 0;
  };

  // The arena rounds `budget` down to whole pages and charges it as staging on the host.
  StagingArena(device::Device& device, Bytes budget)
      : memory_(staging_memory(device, budget)),
        offsets_(
            std::make_shared<memory::OffsetAllocator>(Bytes(memory().size()), kPartAlignment)) {}

  // Takes `bytes` from the free room; nullopt if they are not free.
  std::optional<Extent> try_take(Bytes bytes) {
    const std::optional<Bytes> offset = offsets_->try_allocate(bytes);
    if (!offset) return std::nullopt;
    return Extent(offsets_, *offset, memory().subspan(offset->size(), bytes.size()));
  }
  // Also takes room that holders free without effort. `asks` gives way first, here and below.
  std::optional<Extent> take_spare(Bytes bytes, Holder& asks) {
    while (true) {
      if (auto extent = try_take(bytes)) return extent;
      if (!make_way(Effort::kNone, &asks)) return std::nullopt;
    }
  }
  // One extent for each size, or nullopt when no holder can give way any more. The least effort
  // comes first.
  std::optional<std::vector<Extent>> take_together(std::span<const Bytes> sizes,
                                                   Holder* asks = nullptr) {
    while (true) {
      if (auto extents = try_together(sizes)) return extents;
      if (!make_way(Effort::kNone, asks) && !make_way(Effort::kWait, asks) &&
          !make_way(Effort::kReadAgain, asks)) {
        return std::nullopt;
      }
    }
  }

  // The whole memory, which stays in place as long as the arena, for an I/O engine that registers
  // it.
  std::span<std::byte> memory() { return memory_->bytes(); }
  Bytes budget() const { return offsets_->capacity(); }
  // The bytes, in whole pages, that each holder should lease at once, and the bytes that it should
  // prefetch. All holders together lease a third of the budget. The holder at work may prefetch
  // into a second third, while the last third is still being written.
  static constexpr std::int64_t kShares = 3;
  Bytes lease_share() const {
    const auto holders = std::max<std::int64_t>(1, std::ssize(holders_));
    const Bytes share = budget() / (kShares * holders);
    return std::max(share - share % kPartAlignment, kPartAlignment);
  }
  Bytes ahead_share() const { return budget() / kShares; }
  Bytes in_use() const { return offsets_->in_use(); }

  // From now on the arena asks this holder, until it leaves.
  void join(Holder& holder) { holders_.push_back(&holder); }
  void leave(Holder& holder) { std::erase(holders_, &holder); }

 private:
  static std::unique_ptr<device::HostMemory> staging_memory(device::Device& device, Bytes budget) {
    const Bytes bytes = budget - budget % kPartAlignment;
    if (bytes < kPartAlignment)
      throw UsageError("a staging arena needs a budget of {} at least: {} given",
                       to_string(kPartAlignment), to_string(budget));
    auto memory = device.allocate_host(bytes, memory::Kind::kStaging);
    if (!memory->pinned())
      throw OutOfMemoryError(
          "the system does not let this process pin the memory that states on a drive are staged "
          "through: {} wanted; raise the limit on locked memory (ulimit -l) or lower the budget; "
          "held: {}",
          to_string(bytes), device.ledger()->report());
    const auto address = reinterpret_cast<std::uintptr_t>(memory->bytes().data());
    STRATA_ASSERT(address % kPartAlignment.size() == 0);
    return memory;
  }
  std::optional<std::vector<Extent>> try_together(std::span<const Bytes> sizes) {
    std::vector<Extent> extents;
    for (const Bytes size : sizes) {
      auto extent = try_take(size);
      if (!extent) return std::nullopt;
      extents.push_back(std::move(*extent));
    }
    return extents;
  }
  bool make_way(Effort effort, Holder* asks) {
    if (asks != nullptr && asks->free_memory(effort)) return true;
    return std::ranges::any_of(
        holders_, [&](Holder* holder) { return holder != asks && holder->free_memory(effort); });
  }

  std::unique_ptr<device::HostMemory> memory_;
  std::shared_ptr<memory::OffsetAllocator> offsets_;  // of the memory
  std::vector<Holder*> holders_;
};

}  // namespace strata::offload
