#include "strata/engine/optimize/shard_memory.h"

#include "strata/base/error.h"
#include "strata/offload/pinned_memory.h"

namespace strata::engine {
namespace {

constexpr Bytes kAlignment = 256_B;  // as memory of a device has

Bytes room_of(const Unit& unit) {
  return align_up(bytes_of(unit.layout.shard(), DType::kFloat32), kAlignment);
}

}  // namespace

bool ShardMemory::lacks(const Unit& unit) const {
  return places_[static_cast<std::size_t>(unit.id)].values == nullptr && wanted_(unit);
}

std::span<float> ShardMemory::of(const Unit& unit) {
  STRATA_ASSERT(wanted_(unit));
  places_.resize(shards_.weights().units().size());
  Place& place = places_[static_cast<std::size_t>(unit.id)];
  if (lacks(unit) && shards_.states_on_host(unit)) take_on_host();
  if (lacks(unit)) {
    place.own = device_.allocate(room_of(unit), kind_);
    place.values = place.own->bytes().data();
  }
  return {reinterpret_cast<float*>(place.values), unit.layout.shard().size()};
}

void ShardMemory::take_on_host() {
  const std::vector<Unit>& units = shards_.weights().units();
  const auto missing = [this](const Unit& unit) {
    return unit.trainable() && shards_.states_on_host(unit) && lacks(unit);
  };
  Bytes all;
  for (const Unit& unit : units) {
    if (missing(unit)) all += room_of(unit);
  }
  host_.push_back(offload::pinned_memory(device_, all, kind_));
  std::byte* next = host_.back()->bytes().data();
  for (const Unit& unit : units) {
    if (!missing(unit)) continue;
    places_[static_cast<std::size_t>(unit.id)].values = next;
    next += room_of(unit).size();
  }
}

void ShardMemory::free_on_device() {
  for (Place& place : places_) {
    if (place.own != nullptr) place = {};
  }
}

}  // namespace strata::engine
