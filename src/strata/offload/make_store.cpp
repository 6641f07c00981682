#include "strata/offload/make_store.h"

#include <iterator>
#include <utility>

#include "strata/base/error.h"
#include "strata/io/striping.h"
#include "strata/offload/block_file.h"
#include "strata/offload/nvme_store.h"

namespace strata::offload {
namespace {

class TieredStore final : public StateStore {
 public:
  explicit TieredStore(std::vector<std::shared_ptr<StateStore>> stores)
      : stores_(std::move(stores)) {}

  memory::Tier tier() const override { return stores_.front()->tier(); }
  std::vector<BlockId> add_all(std::vector<BlockSpec> blocks) override {
    std::vector<std::vector<BlockSpec>> by_store(stores_.size());
    std::vector<std::size_t> chosen;
    for (BlockSpec& block : blocks) {
      chosen.push_back(store_for(block));
      by_store[chosen.back()].push_back(std::move(block));
    }
    std::vector<BlockId> ids;
    ids.reserve(chosen.size());
    std::vector<Place> places = places_;
    places.reserve(places_.size() + chosen.size());
    std::vector<std::size_t> next(stores_.size());
    std::vector<std::vector<BlockId>> added(stores_.size());
    try {
      for (std::size_t s = 0; s < stores_.size(); ++s) {
        if (!by_store[s].empty()) added[s] = stores_[s]->add_all(std::move(by_store[s]));
      }
    } catch (...) {  // what has room in one store has none without the others
      take_from_stores(added);
      throw;
    }
    for (const std::size_t s : chosen) {
      ids.push_back(static_cast<BlockId>(places.size()));
      places.push_back({s, added[s][next[s]++]});
    }
    places_ = std::move(places);
    last_ = std::move(added);
    return ids;
  }
  void take_back(std::span<const BlockId> added) noexcept override {
    places_.resize(places_.size() - added.size());
    take_from_stores(last_);
    last_.clear();
  }
  Bytes size_of(BlockId block) const override {
    const Place& place = place_of(block);
    return stores_[place.store]->size_of(place.block);
  }
  std::vector<std::unique_ptr<Lease>> fetch_all(std::span<const Part> parts,
                                                Access access) override {
    std::vector<std::unique_ptr<Lease>> leases(parts.size());
    for (std::size_t s = 0; s < stores_.size(); ++s) {
      std::vector<Part> there;
      std::vector<std::size_t> index;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const Place& place = place_of(parts[i].block);
        if (place.store != s) continue;
        there.push_back({place.block, parts[i].begin, parts[i].end});
        index.push_back(i);
      }
      if (there.empty()) continue;
      auto lent = stores_[s]->fetch_all(there, access);
      for (std::size_t i = 0; i < lent.size(); ++i) leases[index[i]] = std::move(lent[i]);
    }
    return leases;
  }
  Bytes lease_budget(BlockId block) const override {
    const Place& place = place_of(block);
    return stores_[place.store]->lease_budget(place.block);
  }
  void advance() override {
    for (const auto& store : stores_) store->advance();
  }
  void flush() override {
    for (const auto& store : stores_) store->flush();
  }
  void offload_states(memory::Kind kind, bool pinned) override {
    for (const auto& store : stores_) store->offload_states(kind, pinned);
  }
  void reload_states() override {
    for (const auto& store : stores_) store->reload_states();
  }
  bool cache(std::span<const BlockId> blocks, device::Stream& stream) override {
    const std::size_t store = place_of(blocks.front()).store;
    std::vector<BlockId> there;
    for (const BlockId block : blocks) {
      STRATA_ASSERT(place_of(block).store == store);
      there.push_back(place_of(block).block);
    }
    return stores_[store]->cache(there, stream);
  }
  bool cached(BlockId block) const override {
    const Place& place = place_of(block);
    return stores_[place.store]->cached(place.block);
  }
  void drop_cached() override {
    for (const auto& store : stores_) store->drop_cached();
  }
  StoreCounts counts() const override {
    StoreCounts all;
    for (const auto& store : stores_) all.add(store->counts());
    return all;
  }
  void watch(LinkWatch* watch) override {
    for (const auto& store : stores_) store->watch(watch);
  }
  std::vector<DriveWrites> drive_writes() const override {
    std::vector<DriveWrites> all;
    for (const auto& store : stores_)
      std::ranges::move(store->drive_writes(), std::back_inserter(all));
    return all;
  }
  // One of them at most is on drives.
  DriveLimit measure_drives() override {
    for (const auto& store : stores_) {
      if (store->tier() == memory::Tier::kNvme) return store->measure_drives();
    }
    return {};
  }

 private:
  struct Place {
    std::size_t store = 0;
    BlockId block = -1;  // there
  };
  std::size_t store_for(const BlockSpec& block) const {
    if (!block.tier) return 0;
    for (std::size_t s = 0; s < stores_.size(); ++s) {
      if (stores_[s]->tier() == *block.tier) return s;
    }
    STRATA_ASSERT(false);
  }
  void take_from_stores(std::span<const std::vector<BlockId>> added) noexcept {
    for (std::size_t s = 0; s < added.size(); ++s) {
      if (!added[s].empty()) stores_[s]->take_back(added[s]);
    }
  }
  const Place& place_of(BlockId block) const { return places_[static_cast<std::size_t>(block)]; }

  const std::vector<std::shared_ptr<StateStore>> stores_;
  std::vector<Place> places_;               // by id
  std::vector<std::vector<BlockId>> last_;  // by store: what the last add_all() added
};

// Leaves memory untouched: a forecast has no memory, and reads none of the values.
class DryFile final : public BlockFile {
 public:
  void clear(std::span<std::byte>) override {}
  const std::string& path() const override { return path_; }
  void grow(Bytes) override {}
  // Transfers of no parts are done.
  std::unique_ptr<io::Transfer> read(Bytes, std::span<std::byte>) override {
    return io::joined({});
  }
  std::unique_ptr<io::Transfer> write(Bytes, std::span<const std::byte>) override {
    return io::joined({});
  }

 private:
  std::string path_ = "nowhere";
};

// One store, or one of several tiers. `on_drive` makes that one.
template <typename OnDrive>
std::shared_ptr<StateStore> store_of(const StatePlacement& place, device::Device& device,
                                     const OnDrive& on_drive) {
  std::vector<std::shared_ptr<StateStore>> stores;
  const auto add = [&](memory::Tier tier) {
    const auto is_there = [&](const auto& store) { return store->tier() == tier; };
    if (std::ranges::any_of(stores, is_there)) return;
    stores.push_back(tier == memory::Tier::kNvme ? on_drive() : make_memory_store(tier, device));
  };
  add(place.tier);
  std::ranges::for_each(place.others, add);
  return stores.size() == 1 ? std::move(stores.front()) : make_tiered_store(std::move(stores));
}

// Makes both stores. `file_of` makes the BlockFile of a placement on drives.
template <typename FileOf>
MadeStores stores_of(const StatePlacement& states, const StatePlacement& weights,
                     device::Device& device, const FileOf& file_of) {
  Bytes budget;
  for (const StatePlacement* place : {&states, &weights}) {
    if (place->uses(memory::Tier::kNvme)) budget += place->budget;
  }
  std::shared_ptr<StagingArena> arena;
  const auto make = [&](const StatePlacement& place) {
    return store_of(place, device, [&]() -> std::shared_ptr<StateStore> {
      NvmeStoreOptions options;
      options.file = file_of(place);
      if (arena == nullptr) arena = std::make_shared<StagingArena>(device, budget);
      options.arena = arena;
      options.verify = place.verify;
      return make_nvme_store(device, std::move(options));
    });
  };
  MadeStores made;
  made.states = make(states);
  made.weights = make(weights);
  return made;
}

}  // namespace

std::shared_ptr<StateStore> make_tiered_store(std::vector<std::shared_ptr<StateStore>> stores) {
  return std::make_shared<TieredStore>(std::move(stores));
}

MadeStores make_stores(const StatePlacement& states, const StatePlacement& weights,
                       device::Device& device, int rank) {
  std::string warning;
  const auto say = [&](const std::string& text) {
    if (text.empty() || warning.find(text) != std::string::npos) return;
    warning += (warning.empty() ? "" : "; ") + text;
  };
  MadeStores made = stores_of(states, weights, device, [&](const StatePlacement& place) {
    std::vector<std::unique_ptr<SwapFolder>> folders;
    for (const std::string& path : place.folders) {
      folders.push_back(std::make_unique<SwapFolder>(path, rank));
      say(folders.back()->warning());
    }
    io::ChosenEngine io = io::make_io_engine(place.io);
    say(io.refused);
    return make_block_file(std::move(io.engine), std::move(folders));
  });
  made.warning = std::move(warning);
  return made;
}

MadeStores make_dry_stores(const StatePlacement& states, const StatePlacement& weights,
                           device::Device& device) {
  StatePlacement dry_states = states;
  StatePlacement dry_weights = weights;
  dry_states.verify = dry_weights.verify = false;
  return stores_of(dry_states, dry_weights, device,
                   [](const StatePlacement&) { return std::make_unique<DryFile>(); });
}

}  // namespace strata::offload
