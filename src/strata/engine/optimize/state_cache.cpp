#include "strata/engine/optimize/state_cache.h"

#include <algorithm>
#include <mutex>

namespace strata::engine {
namespace {

constexpr Bytes kLeastSpare = 1_GiB;
constexpr int kMostPatience = 1024;

}  // namespace

StateCache::StateCache(OptimizerShards& shards, const AdamStates& states,
                       offload::StateStore& store, device::Device& device, Bytes limit)
    : shards_(shards), states_(states), store_(store), device_(device), limit_(limit) {}

void StateCache::note_start() {
  if (at_start_ == Bytes())
    at_start_ = device_.free_bytes() + device_.ledger()->held(memory::Tier::kDevice);
}

void StateCache::begin_step(std::span<const int> order, const std::function<bool(const Unit&)>& may,
                            device::Stream& stream, offload::LinkWatch& watch) {
  quiet_ = others_grew_.exchange(false) ? 0 : quiet_ + 1;
  // Gradients of a unit that was given back follow when this step has used them.
  std::erase_if(units_, [this](int unit) {
    if (!has(unit)) shards_.gradients().cache(unit, false);
    return !has(unit);
  });
  if (full_ || limit_ == Bytes() || quiet_ < patience_) return;
  full_ = true;
  Bytes room = spare();
  for (const int id : order) {
    const Unit& unit = nth(shards_.weights().units(), id);
    if (has(id) || !may(unit)) continue;
    const Bytes gradient =
        strata::bytes_of(unit.layout.shard(), shards_.gradients().resting_dtype(id));
    const Bytes cost = bytes_of(unit) + gradient;
    if (cost > room) continue;
    room -= cost;
    held_ += cost.value;
    units_.push_back(id);
    if (!take(unit, stream, watch)) return;
    shards_.gradients().cache(id, true);
  }
}

// The bytes that it may still take.
Bytes StateCache::spare() {
  // Others may want what came free since then, past torch: a generator that sleeps, say.
  const Bytes own = device_.ledger()->held(memory::Tier::kDevice);
  const Bytes free = std::min(device_.free_bytes(), at_start_ - own);
  const Bytes grown = at_start_ - own - free;
  const Bytes left = std::max(kLeastSpare, std::clamp(grown, free / 8, free / 4));
  others_ = std::max(grown, left);
  return std::min(limit_ - bytes(), free - left);
}

bool StateCache::take(const Unit& unit, device::Stream& stream, offload::LinkWatch& watch) {
  std::vector<offload::BlockId> blocks;
  for (const StateBlock& block : states_.blocks(unit.id)) blocks.push_back(block.id);
  bool taken = false;
  watch.copy(offload::Link::kUp, bytes_of(unit), stream, [&] {
    taken = store_.cache(blocks, stream) && (!has_weights(unit) || weights().cache(unit, stream));
  });
  return taken;
}

bool StateCache::has(int unit) const {
  return bytes() > Bytes() && (store_.cached(states_.blocks(unit).back().id) ||
                               weights().cached(nth(shards_.weights().units(), unit)));
}

Bytes StateCache::bytes_of(const Unit& unit) const {
  return states_.bytes_of_unit(unit) + (has_weights(unit) ? unit.layout.shard_bytes() : Bytes());
}

bool StateCache::has_weights(const Unit& unit) const {
  return unit.offloaded && weights().tier_of(unit) == memory::Tier::kHost;
}

void StateCache::bring_back() {
  store_.drop_cached();
  weights().drop_cached();
  held_ = 0;
  full_ = false;
}

void StateCache::drop() {
  const std::scoped_lock lock(*this);
  bring_back();
  for (const int unit : units_) shards_.gradients().cache(unit, false);
  units_.clear();
  quiet_ = 0;
}

bool StateCache::give_back() {
  others_grew_ = true;
  const std::unique_lock lock(*this, std::try_to_lock);
  if (!lock || bytes() == Bytes() || device_.free_bytes() >= others_) return false;
  bring_back();
  patience_ = std::min(2 * patience_, kMostPatience);
  return true;
}

}  // namespace strata::engine
