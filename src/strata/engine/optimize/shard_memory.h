// Memory of fp32 values for trainable units' shards, for a user's optimizer, if the engine's own
// values lie elsewhere or are narrower. If a unit's states rest on the host, this is pinned host
// memory, taken for all units at once, since the driver takes long to pin memory. Otherwise it is
// device memory, taken unit by unit. Its first content is undefined.
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
  // `wanted`: whether of() will be called for the unit.
  using Wanted = std::function<bool(const Unit& unit)>;
  ShardMemory(OptimizerShards& shards, device::Device& device, memory::Kind kind, Wanted wanted)
      : shards_(shards), device_(device), kind_(kind), wanted_(std::move(wanted)) {}

  std::span<float> of(const Unit& unit);
  // Frees the device memory, which no work uses any more.
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
