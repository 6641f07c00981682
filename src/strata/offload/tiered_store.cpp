#include "strata/offload/tiered_store.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "strata/base/error.h"

namespace strata::offload {

std::size_t TieredStore::store_for(const BlockSpec& block) const {
  if (!block.tier) return 0;
  for (std::size_t s = 0; s < stores_.size(); ++s) {
    if (stores_[s]->tier() == *block.tier) return s;
  }
  STRATA_ASSERT(false);
}

std::vector<BlockId> TieredStore::add_all(std::vector<BlockSpec> blocks) {
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

void TieredStore::take_back(std::span<const BlockId> added) noexcept {
  places_.resize(places_.size() - added.size());
  take_from_stores(last_);
  last_.clear();
}

void TieredStore::take_from_stores(std::span<const std::vector<BlockId>> added) noexcept {
  for (std::size_t s = 0; s < added.size(); ++s) {
    if (!added[s].empty()) stores_[s]->take_back(added[s]);
  }
}

Bytes TieredStore::size_of(BlockId block) const {
  const Place& place = place_of(block);
  return stores_[place.store]->size_of(place.block);
}

std::vector<std::unique_ptr<Lease>> TieredStore::fetch_all(std::span<const Part> parts,
                                                           Access access) {
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

Bytes TieredStore::lease_budget(BlockId block) const {
  const Place& place = place_of(block);
  return stores_[place.store]->lease_budget(place.block);
}

void TieredStore::advance() {
  for (const auto& store : stores_) store->advance();
}

void TieredStore::flush() {
  for (const auto& store : stores_) store->flush();
}

void TieredStore::offload_states(memory::Kind kind, bool pinned) {
  for (const auto& store : stores_) store->offload_states(kind, pinned);
}

void TieredStore::reload_states() {
  for (const auto& store : stores_) store->reload_states();
}

StoreCounts TieredStore::counts() const {
  StoreCounts all;
  for (const auto& store : stores_) all = all + store->counts();
  return all;
}

void TieredStore::watch(LinkWatch* watch) {
  for (const auto& store : stores_) store->watch(watch);
}

std::vector<DriveWrites> TieredStore::wear() const {
  std::vector<DriveWrites> all;
  for (const auto& store : stores_) std::ranges::move(store->wear(), std::back_inserter(all));
  return all;
}

// One of them at most is on drives.
DriveLimit TieredStore::measure_drives() {
  for (const auto& store : stores_) {
    if (store->tier() == memory::Tier::kNvme) return store->measure_drives();
  }
  return {};
}

}  // namespace strata::offload
