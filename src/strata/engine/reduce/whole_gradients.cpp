#include "strata/engine/reduce/whole_gradients.h"

#include <algorithm>
#include <memory>
#include <span>

namespace strata::engine {

void WholeGradients::gather(const Take& take) {
  reducer_.complete_groups();
  reducer_.reduce_late();
  GradientShards& shards = reducer_.shards();
  const auto wanted = [](const Unit& unit) { return unit.trainable() && !unit.spec.tile(); };
  Bytes largest;
  for (const Unit& unit : units_) {
    if (wanted(unit)) largest = std::max(largest, bytes_of(unit.layout.padded(), DType::kFloat32));
  }
  if (largest == Bytes()) return;
  const auto memory = device_.allocate(largest, memory::Kind::kStaging);
  device::Stream& stream = device_.compute_stream();
  const auto mine = static_cast<std::size_t>(collectives_.shard_position().index);
  for (const Unit& unit : units_) {
    if (!wanted(unit)) continue;
    const std::size_t bytes = bytes_of(unit.layout.shard(), DType::kFloat32).size();
    const auto slice = [&](std::size_t rank) {
      return memory->bytes().subspan(rank * bytes, bytes);
    };
    if (shards.filled(unit.id)) {
      device_.copy(slice(mine), std::as_bytes(shards.values(unit.id)), stream);
    } else {
      device_.fill_zero(slice(mine), stream);
    }
    stream.synchronize();
    // Where every shard group holds all of them, those of the first count.
    for (int rank = 0; rank < unit.layout.world_size(); ++rank)
      collectives_.broadcast(slice(static_cast<std::size_t>(rank)), rank);
    if (take) take(unit, reinterpret_cast<const float*>(memory->bytes().data()));
  }
  stream.synchronize();
}

void WholeGradients::take_shard(int unit, const Take& take) {
  reducer_.reduce_late();
  GradientShards& shards = reducer_.shards();
  if (shards.filled(unit)) take(units_[static_cast<std::size_t>(unit)], shards.values(unit).data());
}

}  // namespace strata::engine
