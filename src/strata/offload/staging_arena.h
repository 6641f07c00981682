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

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "strata/base/interface.h"
#include "strata/device/device.h"
#include "strata/memory/arena.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

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
  StagingArena(device::Device& device, Bytes budget);

  // Takes `bytes` from the free room; nullopt if they are not free.
  std::optional<memory::Extent> try_take(Bytes bytes);
  // Also takes room that holders free without effort. `asks` gives way first, here and below.
  std::optional<memory::Extent> take_spare(Bytes bytes, Holder& asks);
  // One extent for each size, or nullopt when no holder can give way any more. The least effort
  // comes first.
  std::optional<std::vector<memory::Extent>> take_together(std::span<const Bytes> sizes,
                                                           Holder* asks = nullptr);

  // The whole memory, which stays in place as long as the arena, for an I/O engine that registers
  // it.
  std::span<std::byte> memory() { return memory_->bytes(); }
  Bytes budget() const { return arena_.capacity(); }
  // The bytes, in whole pages, that each holder should lease at once, and the bytes that it should
  // prefetch. All holders together lease a third of the budget. The holder at work may prefetch
  // into a second third, while the last third is still being written.
  static constexpr std::int64_t kShares = 3;
  Bytes lease_share() const;
  Bytes ahead_share() const { return budget() / kShares; }
  Bytes in_use() const { return arena_.in_use(); }

  // From now on the arena asks this holder, until it leaves.
  void join(Holder& holder) { holders_.push_back(&holder); }
  void leave(Holder& holder) { std::erase(holders_, &holder); }

 private:
  std::optional<std::vector<memory::Extent>> try_together(std::span<const Bytes> sizes);
  bool make_way(Effort effort, Holder* asks);

  std::unique_ptr<device::HostMemory> memory_;
  memory::Arena arena_;
  std::vector<Holder*> holders_;
};

}  // namespace strata::offload
