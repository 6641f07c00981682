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

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <thread>
#include <vector>

#include "strata/engine/optimize/adam_states.h"

namespace strata::engine {

class StateCache {
 public:
  // `limit`: of the bytes; 0 caches nothing.
  StateCache(OptimizerShards& shards, const AdamStates& states, offload::StateStore& store,
             device::Device& device, Bytes limit);

  void lock() {
    while (!try_lock()) std::this_thread::yield();
  }
  bool try_lock() { return !locked_.exchange(true); }
  void unlock() { locked_ = false; }

  // A step begins, with the lock held, which updates these units in their order. Caches those of
  // which `may` says so, by copies in `stream`.
  void begin_step(std::span<const int> order, const std::function<bool(const Unit&)>& may,
                  device::Stream& stream, offload::LinkWatch& watch);
  // Others hold little now.
  void note_start();
  bool has(int unit) const;
  Bytes bytes() const { return Bytes(held_); }
  // Brings all states back to the host, between steps; with give_back() only where less is free
  // than others may want. That returns whether it did.
  void drop();
  bool give_back();

 private:
  bool take(const Unit& unit, device::Stream& stream, offload::LinkWatch& watch);
  void bring_back();
  Bytes bytes_of(const Unit& unit) const;
  bool has_weights(const Unit& unit) const;  // on the host
  const WeightShards& weights() const { return shards_.weights().shards(); }
  Bytes spare();

  OptimizerShards& shards_;
  const AdamStates& states_;
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
