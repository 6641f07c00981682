// The memory that a rank stages blocks through: one allocation of host memory, pinned where the
// device is a GPU, so that drives write into it and kernels work in it. It has a budget in bytes
// and gives out extents of any size and number within it. Who asks for more than is free waits:
// the holders are asked to give way, which they do by dropping what they hold to be quick, or by
// waiting for a transfer of their own.
//
// No deadlock. All is done by one thread, nobody waits for what another user of the arena has still
// to do, and a transfer always ends. What must be held at once is taken in one call: extents that
// fit into an empty arena are given whenever nothing is leased; where leases lie in between, the
// call may end without, and its caller says so. Holders that keep to lease_share() do not meet
// that: the others' leases leave gaps, of which the largest has a share's room.
//
// Threads: one at a time, which is that of the holders. Ownership: extents keep bookkeeping alive,
// not the memory: holders keep the arena. Units: extents are whole pages of 4 KiB, and begin at
// one. Errors: OutOfMemoryError; UsageError for a budget below one page.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "strata/device/device.h"
#include "strata/memory/arena.h"
#include "strata/offload/part.h"

namespace strata::offload {

class StagingArena {
 public:
  // What it costs a holder to give way: nothing; a wait for a write that goes on anyway; bytes that
  // it will have to read again.
  enum class Effort { kNone, kWait, kReadAgain };
  // Who has extents that it can do without.
  class Holder {
   public:
    virtual ~Holder() = default;
    // Gives an extent back, or brings that one step nearer. False: it has nothing for so much
    // effort.
    virtual bool give_way(Effort effort) = 0;
  };

  // `budget` is rounded down to whole pages and is what it charges, as staging on the host.
  StagingArena(device::Device& device, Bytes budget);

  // So many bytes of what is free now; nothing where they are not there.
  std::optional<memory::Extent> try_take(Bytes bytes);
  // Of what is free, or becomes free without effort. Who asks gives way first, here and below.
  std::optional<memory::Extent> take_spare(Bytes bytes, Holder& asks);
  // One for each size, or nothing where nobody can give way any more. The least effort comes first.
  std::optional<std::vector<memory::Extent>> take_together(std::span<const Bytes> sizes,
                                                           Holder* asks = nullptr);

  // All of it, in place as long as the arena: for an I/O engine that takes memory beforehand.
  std::span<std::byte> memory() { return memory_->bytes(); }
  Bytes budget() const { return arena_.capacity(); }
  // What each holder should lease at once, in whole pages, and what it should read ahead. A third
  // of the budget is leased, by all of them together, while a third may be read ahead, by whoever
  // is at work, and the last one is still being written.
  static constexpr std::int64_t kShares = 3;
  Bytes lease_share() const;
  Bytes ahead_share() const { return budget() / kShares; }
  Bytes in_use() const { return arena_.in_use(); }

  // A holder is asked from now on, until it leaves.
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
