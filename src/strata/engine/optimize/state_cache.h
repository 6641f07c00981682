// A cache in free memory of the device for state that rests on the host, by unit: optimizer states,
// offloaded weights, gradients. The device updates cached units, and gathers them, without its
// link. The cache first lets some steps show how much memory others (torch, other programs) take.
// Then it takes units in the order in which the next forward needs them. It leaves as much free as
// others took since the start, between an eighth and a quarter of what is free. If others grow
// again and find less than that, it gives all of it back, so that they do not run out, and waits
// for twice as many steps before it takes units again.
//
// Threads: one at a time; give_back() any. The thread that updates states holds the lock meanwhile.
// Ownership: borrows shards, states, store and device; the stream stays until drop(). Units: bytes
// of the device. Errors: those of the store; where memory is short it only caches less.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "strata/engine/optimize/native_states.h"

namespace strata::engine {

class StateCache {
 public:
  // `limit`: of the bytes; 0 caches nothing.
  StateCache(OptimizerShards& shards, const NativeStates& states, offload::StateStore& store,
             device::Device& device, Bytes limit)
      : shards_(shards), states_(states), store_(store), device_(device), limit_(limit) {}

  void lock() {
    while (!try_lock()) std::this_thread::yield();
  }
  bool try_lock() { return !locked_.exchange(true); }
  void unlock() { locked_ = false; }

  // A step begins, with the lock held, which updates these units in their order. Caches those of
  // which `may` says so, by copies in `stream`.
  void begin_step(std::span<const int> order, const std::function<bool(const Unit&)>& may,
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
  // Others hold little now.
  void note_start() {
    if (at_start_ == Bytes())
      at_start_ = device_.free_bytes() + device_.ledger()->held(memory::Tier::kDevice);
  }
  bool has(int unit) const {
    return bytes() > Bytes() && (store_.cached(states_.blocks(unit).back().id) ||
                                 weights().cached(nth(shards_.weights().units(), unit)));
  }
  Bytes bytes() const { return Bytes(held_); }
  // Brings all states back to the host, between steps; with give_back() only where less is free
  // than others may want. That returns whether it did.
  void drop() {
    const std::scoped_lock lock(*this);
    bring_back();
    for (const int unit : units_) shards_.gradients().cache(unit, false);
    units_.clear();
    quiet_ = 0;
  }
  bool give_back() {
    others_grew_ = true;
    const std::unique_lock lock(*this, std::try_to_lock);
    if (!lock || bytes() == Bytes() || device_.free_bytes() >= others_) return false;
    bring_back();
    patience_ = std::min(2 * patience_, kMostPatience);
    return true;
  }

 private:
  static constexpr Bytes kLeastSpare = 1_GiB;
  static constexpr int kMostPatience = 1024;

  bool take(const Unit& unit, device::Stream& stream, offload::LinkWatch& watch) {
    std::vector<offload::BlockId> blocks;
    for (const StateBlock& block : states_.blocks(unit.id)) blocks.push_back(block.id);
    bool taken = false;
    watch.copy(offload::Link::kUp, bytes_of(unit), stream, [&] {
      taken = store_.cache(blocks, stream) && (!has_weights(unit) || weights().cache(unit, stream));
    });
    return taken;
  }
  void bring_back() {
    store_.drop_cached();
    weights().drop_cached();
    held_ = 0;
    full_ = false;
  }
  Bytes bytes_of(const Unit& unit) const {
    return states_.bytes_of_unit(unit) + (has_weights(unit) ? unit.layout.shard_bytes() : Bytes());
  }
  bool has_weights(const Unit& unit) const {  // on the host
    return unit.offloaded && weights().tier_of(unit) == memory::Tier::kHost;
  }
  const WeightShards& weights() const { return shards_.weights().shards(); }
  // The bytes that it may still take.
  Bytes spare() {
    // Others may want what came free since then, past torch: a generator that sleeps, say.
    const Bytes own = device_.ledger()->held(memory::Tier::kDevice);
    const Bytes free = std::min(device_.free_bytes(), at_start_ - own);
    const Bytes grown = at_start_ - own - free;
    const Bytes left = std::max(kLeastSpare, std::clamp(grown, free / 8, free / 4));
    others_ = std::max(grown, left);
    return std::min(limit_ - bytes(), free - left);
  }

  OptimizerShards& shards_;
  const NativeStates& states_;
  offload::StateStore& store_;
  device::Device& device_;
  const Bytes limit_;
  Bytes at_start_;  // free, or the engine's
  std::vector<int> units_;
  std::atomic<std::int64_t> held_ = 0;
  std::atomic<bool> locked_ = false;
  std::atomic<bool> others_grew_ = false;  // since the last step began
  // Guarded by the lock:
  Bytes others_;       // may want so much
  bool full_ = false;  // nothing more is cached
  int quiet_ = 0;      // steps in which others did not grow
  int patience_ = 2;   // of them, before it caches
};

}  // namespace strata::engine
