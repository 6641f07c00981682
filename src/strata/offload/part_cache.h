// Lends parts of a drive's blocks in the staging arena. Parts that are prefetched, leased, being
// written, or left from their last use share it. This class decides which part gets memory;
// ResidentParts changes the states. When the arena needs room, the cache first evicts
// parts without a predicted use. Then it waits for a write to end. Last, it evicts the part with
// the farthest predicted use.
//
// Callers use parts in rounds. So the next use of the part that was used last is the farthest, and
// that part goes first among those without a predicted use. But a part that was not used for two
// rounds goes before it. This keeps a share of the parts from round to round. Prefetched parts hold
// at most a third of the arena, or one part that is larger.
//
// The cache writes a returned part in the first later call that finds the device's work on it done,
// unless that call leases the part again. The cache has no thread of its own. Threads: one at a
// time. Ownership: each lease keeps the cache alive; the device outlives both. Errors: the cache
// stores an error with its block and never lends that block again. The next lease() or flush() also
// throws the error of a write.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "strata/device/device.h"
#include "strata/offload/resident_parts.h"
#include "strata/offload/staging_arena.h"

namespace strata::offload {

class PartCache final : public StagingArena::Holder {
 public:
  using Place = ResidentParts::Place;

  // The blocks' bookkeeping and their file are shared with the store that adds blocks.
  PartCache(device::Device& device, std::shared_ptr<StagingArena> arena,
            std::shared_ptr<DriveBlocks> blocks, std::shared_ptr<BlockFile> file);
  ~PartCache() override;  // waits for transfers under way
  PartCache(const PartCache&) = delete;
  PartCache& operator=(const PartCache&) = delete;

  // Leases all parts or none, in their order, and waits until they are in memory. The parts are not
  // empty and do not overlap.
  std::vector<Place> lease(std::span<const Part> parts);
  static std::span<std::byte> bytes_of(Place place);
  // `used`: an event after the last use; null: the compute stream holds it.
  void give_back(Place place, Access access, std::unique_ptr<device::Event> used) noexcept;

  // Predicts a use of the part soon, after all uses predicted before. Begins to read it if there is
  // room beside the parts with a predicted use. False: there is none now, and none for a later part
  // either.
  bool predict(const Part& part);
  void forget(const Part& part);  // the part's use is not predicted any more
  // How many parts are leased from one use of a part to its next; 0: unknown.
  void set_round(std::int64_t parts) { round_ = parts; }

  void advance() { resident_.advance(); }
  void flush();
  bool free_memory(StagingArena::Effort effort) override;
  StoreCounts counts() { return resident_.counts(); }
  void watch(LinkWatch* watch) { resident_.watch(watch); }

 private:
  class Reservation;
  void require_lendable(std::span<const Part> parts);
  bool is_ready(const Part& part) const;
  void read_missing(std::span<const Part> parts, const Reservation& reservation);
  Place wait_for(const Part& part);
  bool evict_unpredicted();
  bool evict_farthest();
  [[noreturn]] void throw_no_room(std::span<const Part> parts);

  device::Device& device_;
  const std::shared_ptr<StagingArena> arena_;
  const std::shared_ptr<DriveBlocks> blocks_;
  ResidentParts resident_;
  std::int64_t round_ = 0;  // 0: unknown
};

}  // namespace strata::offload
