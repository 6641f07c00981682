// StateStore over several tiers: each block rests in the tier that it names (BlockSpec::tier), or
// else in the first. Parts of several tiers may be fetched together; the rules about room apply to
// each tier by itself. Threads: one at a time. Ownership: owns the stores. Errors: those of the
// stores.
#pragma once

#include <memory>
#include <vector>

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
  std::vector<DriveWrites> wear() const override;
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

}  // namespace strata::offload
