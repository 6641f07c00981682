// Memory of fp32 values for trainable units' shards that an optimizer of the user's works on, where
// the engine's own values lie elsewhere or are narrower. Where a unit's states rest on the host it
// is pinned host memory, taken for all units at once, since to pin takes the driver long; else it
// is memory of the device, taken unit by unit. Contents are undefined at first.
//
// Threads: one thread at a time. Ownership: borrows the shards and the device. Errors:
// OutOfMemoryError.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/optimize/optimizer_shards.h"

namespace strata::engine {

class ShardMemory {
 public:
  // `wanted`: whether the unit will be asked for.
  using Wanted = std::function<bool(const Unit& unit)>;
  ShardMemory(OptimizerShards& shards, device::Device& device, memory::Kind kind, Wanted wanted)
      : shards_(shards), device_(device), kind_(kind), wanted_(std::move(wanted)) {}

  std::span<float> of(const Unit& unit);
  // Gives back what is memory of the device, which no work uses any more.
  void free_on_device();

 private:
  bool lacks(const Unit& unit) const;
  void take_on_host();

  OptimizerShards& shards_;
  device::Device& device_;
  memory::Kind kind_;
  Wanted wanted_;
  std::vector<std::unique_ptr<device::Memory>> host_;  // each of several units
  struct Place {
    std::byte* values = nullptr;               // null: none yet
    std::unique_ptr<device::Memory> own = {};  // null: on the host
  };
  std::vector<Place> places_;  // by unit
};

}  // namespace strata::engine
