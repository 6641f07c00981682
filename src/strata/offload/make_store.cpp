#include "strata/offload/make_store.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/io/io_engine.h"
#include "strata/offload/memory_store.h"
#include "strata/offload/nvme_store.h"
#include "strata/offload/swap_folder.h"
#include "strata/offload/tiered_store.h"

namespace strata::offload {
namespace {

class DryTransfer final : public io::Transfer {
 public:
  bool done() override { return true; }
  void wait() override {}
};

// Leaves memory untouched: a forecast has no memory, and reads none of the values.
class DryFile final : public BlockFile {
 public:
  void clear(std::span<std::byte>) override {}
  const std::string& path() const override { return path_; }
  void grow(Bytes) override {}
  std::unique_ptr<io::Transfer> read(Bytes, std::span<std::byte>) override {
    return std::make_unique<DryTransfer>();
  }
  std::unique_ptr<io::Transfer> write(Bytes, std::span<const std::byte>) override {
    return std::make_unique<DryTransfer>();
  }

 private:
  std::string path_ = "nowhere";
};

std::shared_ptr<StateStore> memory_store(memory::Tier tier, device::Device& device) {
  if (tier == memory::Tier::kDevice) return MemoryStore::on_device(device);
  HostStoreOptions options;
  options.device = &device;
  return MemoryStore::on_host(std::move(options));
}

// One store, or one of several tiers. `on_drive` makes that one.
template <typename OnDrive>
std::shared_ptr<StateStore> store_of(const StatePlacement& place, device::Device& device,
                                     const OnDrive& on_drive) {
  std::vector<std::shared_ptr<StateStore>> stores;
  const auto add = [&](memory::Tier tier) {
    const auto is_there = [&](const auto& store) { return store->tier() == tier; };
    if (std::ranges::any_of(stores, is_there)) return;
    stores.push_back(tier == memory::Tier::kNvme ? on_drive() : memory_store(tier, device));
  };
  add(place.tier);
  std::ranges::for_each(place.others, add);
  if (stores.size() == 1) return std::move(stores.front());
  return std::make_shared<TieredStore>(std::move(stores));
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
      return std::make_shared<NvmeStore>(device, std::move(options));
    });
  };
  MadeStores made;
  made.states = make(states);
  made.weights = make(weights);
  return made;
}

}  // namespace

MadeStores make_stores(const StatePlacement& states, const StatePlacement& weights,
                       device::Device& device, int rank) {
  std::string remark;
  const auto say = [&](const std::string& text) {
    if (text.empty() || remark.find(text) != std::string::npos) return;
    remark += (remark.empty() ? "" : "; ") + text;
  };
  MadeStores made = stores_of(states, weights, device, [&](const StatePlacement& place) {
    std::vector<std::unique_ptr<SwapFolder>> folders;
    for (const std::string& path : place.folders) {
      folders.push_back(std::make_unique<SwapFolder>(path, rank));
      say(folders.back()->remark());
    }
    io::ChosenEngine io = io::make_io_engine(place.io);
    say(io.refused);
    return make_block_file(std::move(io.engine), std::move(folders));
  });
  made.remark = std::move(remark);
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
