// Lends parts of a drive's blocks in the staging arena: what is read ahead, lent, written, or left
// from its last use shares it. Where room is wanted, first goes what nobody expects; then it waits
// for writes; then goes what is expected last. Of what nobody expects yet, what was used last goes
// first, since users go round: its next use is the farthest. So a share of the parts stays from
// round to round, while a third of the arena at most holds what is read ahead. What was not used
// for two rounds goes before all others.
//
// A part that was given back is written from the next call on that finds the device's work on it
// done, unless that call asks for it again; no thread is behind this. Threads: one at a time.
// Ownership: whoever holds what was lent keeps the cache alive; the device outlives both. Errors:
// an error is kept with its block, which is not lent again; that of a write is thrown by the next
// lease() or flush(), too.
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

  // The blocks' bookkeeping and their file are shared with who adds blocks.
  PartCache(device::Device& device, std::shared_ptr<StagingArena> arena,
            std::shared_ptr<DriveBlocks> blocks, std::shared_ptr<BlockFile> file);
  ~PartCache() override;  // waits for what goes on
  PartCache(const PartCache&) = delete;
  PartCache& operator=(const PartCache&) = delete;

  // All or none, in their order, when they are there. The parts are not empty and lie apart.
  std::vector<Place> lease(std::span<const Part> parts);
  static std::span<std::byte> bytes_of(Place place);
  // `used`: an event after the last use; null: the compute stream holds it.
  void give_back(Place place, Access access, std::unique_ptr<device::Event> used) noexcept;

  // The part is wanted soon, after all that are expected already. Begins to read it where there is
  // room beside what is expected. False: not now, and nothing after it either.
  bool expect(const Part& part);
  // How many parts are lent from one use of a part to its next; 0: not known.
  void set_round(std::int64_t parts) { round_ = parts; }
  void forget(const Part& part);  // is not expected any more

  void advance() { resident_.advance(); }
  void flush();
  bool give_way(StagingArena::Effort effort) override;
  StoreCounts counts() { return resident_.counts(); }
  void watch(LinkWatch* watch) { resident_.watch(watch); }

 private:
  class Claim;
  void require_lendable(std::span<const Part> parts);
  bool at_hand(const Part& part) const;
  void take_room(std::span<const Part> parts, const Claim& claim);
  Place await(const Part& part);
  Place insert(const Part& part, memory::Extent extent);
  bool drop_spare();
  bool expel_farthest();
  [[noreturn]] void throw_no_room(std::span<const Part> parts);

  device::Device& device_;
  const std::shared_ptr<StagingArena> arena_;
  const std::shared_ptr<DriveBlocks> blocks_;
  ResidentParts resident_;
  std::int64_t turn_ = 0;   // of the last that was expected
  std::int64_t now_ = 0;    // parts that were lent
  std::int64_t round_ = 0;  // 0: not known
};

}  // namespace strata::offload
