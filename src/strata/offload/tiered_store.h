// StateStore over several tiers: each block rests in the one that it names (BlockSpec::tier), the
// others in the first. Parts that are fetched together may be of several; the rules about room are
// those of each tier for its own. Threads: one at a time. Ownership: owns the stores. Errors:
// theirs.
#pragma once

#include <memory>
#include <vector>

#include "strata/offload/state_store.h"

namespace strata::offload {

class TieredStore final : public StateStore {
 public:
  // At least one store, each of a tier of its own.
  explicit TieredStore(std::vector<std::shared_ptr<StateStore>> stores)
      : stores_(std::move(stores)) {}

  memory::Tier tier() const override { return stores_.front()->tier(); }
  std::vector<BlockId> add_all(std::vector<BlockSpec> blocks) override;
  void take_back(std::span<const BlockId> added) noexcept override;
  Bytes size_of(BlockId block) const override;
  std::vector<std::unique_ptr<Lease>> fetch_together(std::span<const Part> parts,
                                                     Access access) override;
  Bytes lease_budget(BlockId block) const override;
  void advance() override;
  void flush() override;
  void park(memory::Kind kind, bool pinned) override;
  void unpark() override;
  StoreCounts counts() const override;
  void watch(LinkWatch* watch) override;
  std::vector<DriveWear> wear() const override;
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
