#include "strata/engine/optimize/external_masters.h"

namespace strata::engine {

ExternalMasters::ExternalMasters(OptimizerShards& shards, device::Device& device,
                                 offload::LinkWatch& watch)
    : shards_(shards),
      device_(device),
      watch_(watch),
      copies_(
          shards.weights().units(), device, memory::Kind::kMasterWeights, DType::kFloat32,
          [&shards](const Unit& unit) { return shards.states_on_host(unit); },
          [this](const Unit& unit) { return has_copy(unit); }) {}

std::span<float> ExternalMasters::values(const Unit& unit) {
  if (has_copy(unit)) return copies_.floats_of(unit);
  const std::span<std::byte> held = shards_.weights().masters().hold(unit.id);
  return {reinterpret_cast<float*>(held.data()), unit.layout.shard().size()};
}

void ExternalMasters::read(const Unit& unit) {
  shards_.weights().masters().adopt_written(unit.id);
  if (has_copy(unit)) move_copy(unit, copies_.floats_of(unit), offload::Access::kRead);
}

void ExternalMasters::move_copy(const Unit& unit, std::span<float> values, offload::Access access) {
  const std::span<std::byte> copy = std::as_writable_bytes(values);
  const bool reads = access == offload::Access::kRead;
  const auto move_piece = [&](const WeightShards::Piece& piece) {
    const auto there =
        copy.subspan(bytes_of(piece.begin, DType::kFloat32).size(), piece.bytes.size());
    device_.copy(reads ? there : piece.bytes, reads ? piece.bytes : there,
                 device_.compute_stream());
  };
  // Offloaded weights are on the host, too.
  const bool on_host = shards_.states_on_host(unit) || shards_.states_on_drive(unit);
  const bool crosses = unit.offloaded != on_host;
  const Bytes bytes(crosses ? copy.size() : 0);
  const bool up = reads == unit.offloaded;
  move(up ? bytes : Bytes(), up ? Bytes() : bytes, [&] {
    shards_.weights().shards().for_each(unit.id, Numel(), unit.layout.shard(), access,
                                        device_.compute_stream(), move_piece);
  });
}

void ExternalMasters::take_back(const OptimizerShards::UnitShard& shard, const Skips& skips) {
  const Unit& unit = of(shard);
  if (has_copy(unit)) return move_copy(unit, copies_.floats_of(unit), offload::Access::kReadWrite);
  const Bytes masters = bytes_of(unit.layout.shard(), DType::kFloat32);
  move(is_far(unit) ? masters : Bytes(), unit.offloaded ? unit.layout.shard_bytes() : Bytes(),
       [&] { round(shard, skips); });
}

void ExternalMasters::round(const OptimizerShards::UnitShard& shard, const Skips& skips) {
  Weights& weights = shards_.weights();
  if (of(shard).layout.dtype() != DType::kFloat64) {
    weights.masters().round(shard.unit);
    return;
  }
  for (const plan::ParamSegment& segment : shard.segments) {
    if (!skips(segment.param)) weights.masters().round(shard.unit, segment.begin, segment.end);
  }
}

}  // namespace strata::engine
