// StateStore over several tiers: each block rests in the tier that it names (BlockSpec::tier), or
// else in the first. Parts of several tiers may be fetched together; the rules about room apply to
// each tier by itself. Threads: one at a time. Ownership: owns the stores. Errors: those of the
// stores.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "strata/device/device.h"
#include "strata/io/engine_choice.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

class TieredStore final : public StateStore {
 public:
  // At least one store; each has a tier of its own.
  explicit TieredStore(std::vector<std::shared_ptr<StateStore>> stores)
      : stores_(std::move(stores)) {}

  memory::Tier tier() const override { return stores_.front()->tier(); }
  std::vector<BlockId> add_all(std::vector<BlockSpec> blocks) override;
  void take_back(std::span<const BlockId> added) noexcept override;
  Bytes size_of(BlockId block) const override;
  std::vector<std::unique_ptr<Lease>> fetch_all(std::span<const Part> parts,
                                                Access access) override;
  Bytes lease_budget(BlockId block) const override;
  void advance() override;
  void flush() override;
  void offload_states(memory::Kind kind, bool pinned) override;
  void reload_states() override;
  StoreCounts counts() const override;
  void watch(LinkWatch* watch) override;
  std::vector<DriveWrites> drive_writes() const override;
  DriveLimit measure_drives() override;

 private:
  struct Place {
    std::size_t store = 0;
    BlockId block = -1;  // there
  };
  void take_from_stores(std::span<const std::vector<BlockId>> added) noexcept;
  std::size_t store_for(const BlockSpec& block) const;
  const Place& place_of(BlockId block) const { return places_[static_cast<std::size_t>(block)]; }

  const std::vector<std::shared_ptr<StateStore>> stores_;
  std::vector<Place> places_;               // by id
  std::vector<std::vector<BlockId>> last_;  // by store: what the last add_all() added
};

// Makes the StateStores of a rank, each for a placement. Threads: one. Ownership: the device
// outlives the stores. Errors: IoError for an unusable folder; OutOfMemoryError.

// The placement of optimizer states between steps.
struct StatePlacement {
  memory::Tier tier = memory::Tier::kDevice;  // of blocks that name none
  std::vector<memory::Tier> others;           // that blocks name
  // For drives: existing folders, one on each drive, and the bytes of host memory to stage through.
  std::vector<std::string> folders;
  Bytes budget;
  io::EngineOptions io = {};
  bool verify = false;  // checksums of what is written and read
  Bytes asked{};        // of the budget, where more is taken

  bool uses(memory::Tier wanted) const {
    return tier == wanted || std::ranges::find(others, wanted) != others.end();
  }
  bool offloads() const { return uses(memory::Tier::kHost) || uses(memory::Tier::kNvme); }
};

struct MadeStores {
  std::shared_ptr<StateStore> states;
  std::shared_ptr<StateStore> weights;
  std::string remark;  // what users should be told once; empty: nothing
};

// Stores that use a drive stage through one arena, with the sum of their budgets: each may use the
// room that the other does not need.
MadeStores make_stores(const StatePlacement& states, const StatePlacement& weights,
                       device::Device& device, int rank);

// For a forecast's device, which computes nothing: the stores hold the same memory, and touch no
// drive.
MadeStores make_dry_stores(const StatePlacement& states, const StatePlacement& weights,
                           device::Device& device);

}  // namespace strata::offload
