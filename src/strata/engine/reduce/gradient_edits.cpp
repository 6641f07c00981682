#include "strata/engine/reduce/gradient_edits.h"

namespace strata::engine {

void GradientEdits::drop_all() {
  if (!record_.collects()) return;
  writes_.drop();
  // Shard groups add up their parts later, also with ranks that have dropped nothing: zeroes then.
  std::vector<int> parts;
  for (const Unit& unit : units_) {
    if (collectives_.shard_position().groups > 1 && shards_.filled(unit.id))
      parts.push_back(unit.id);
  }
  shards_.clear();
  for (const int unit : parts) shards_.change(unit);
  record_.record_all_dropped();
}

void GradientEdits::drop(int unit, int slot, bool came) {
  const plan::FlatLayout& layout = units_[static_cast<std::size_t>(unit)].layout;
  writes_.drop(unit, slot);
  if (shards_.filled(unit)) write(unit, slot, nullptr);
  record_.record_dropped(layout.slots()[static_cast<std::size_t>(slot)].param, came);
}

void GradientEdits::store(int unit, int slot, const float* values) {
  const plan::FlatLayout& layout = units_[static_cast<std::size_t>(unit)].layout;
  writes_.drop(unit, slot);
  write(unit, slot, values);
  record_.record_gradient(layout.slots()[static_cast<std::size_t>(slot)].param);
}

void GradientEdits::write(int unit, int slot, const float* values) {
  const plan::FlatLayout& layout = units_[static_cast<std::size_t>(unit)].layout;
  const DType dtype = shards_.dtype();
  const std::span<std::byte> kept = shards_.change(unit);
  device::Stream& stream = device_.compute_stream();
  for (const plan::ShardRange& piece : layout.pieces(collectives_.shard_position().index)) {
    if (piece.slot != slot) continue;
    const Numel numel = piece.param_end - piece.param_begin;
    const std::span<std::byte> target =
        kept.subspan(bytes_of(piece.shard_offset, dtype).size(), bytes_of(numel, dtype).size());
    if (values == nullptr) {
      device_.fill_zero(target, stream);
    } else {
      device_.cast(target.data(), dtype, reinterpret_cast<const std::byte*>(values),
                   DType::kFloat32, numel, stream);
    }
  }
}

}  // namespace strata::engine
