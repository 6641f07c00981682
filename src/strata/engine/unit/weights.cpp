#include "strata/engine/unit/weights.h"

#include <algorithm>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

constexpr Bytes kPage = 4_KiB;
constexpr Bytes kScratch = 4_MiB;

// `parts`: shards that a rank holds of a unit that is not whole, its own among them.
Bytes local_bytes(const plan::FlatLayout& layout, bool whole, int parts) {
  return whole ? layout.flat_bytes() : layout.shard_bytes() * parts;
}

}  // namespace

Weights::Weights(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
                 const EngineOptions& options, plan::Masters masters,
                 comm::Collectives& collectives, device::Device& device, const Stores& stores)
    : params_(params.begin(), params.end()),
      unit_of_param_(plan.unit_of_param),
      slot_of_param_(params.size()),
      place_(collectives.shard_position()),
      device_(device),
      states_(*stores.states),
      shards_(units_, stores.weights.get()),
      masters_(units_, shards_, masters, device, states_) {
  STRATA_ASSERT(!options.offloads_weights() || (stores.weights != nullptr && place_.parts == 1));
  Bytes total;
  for (const plan::UnitSpec& spec : plan.units) {
    plan::FlatLayout layout(params_, spec.params, spec.dtype, place_.count);
    const bool sharded = options.stage == 3 && !spec.persistent;
    const memory::Tier tier = spec.place.weights.value_or(options.weights.tier);
    const bool offloaded = sharded && tier != memory::Tier::kDevice;
    const bool whole = !offloaded && (!sharded || place_.held_count() == 1);
    offsets_.push_back(total);
    if (!offloaded) total += align_up(local_bytes(layout, whole, place_.parts), kPage);
    for (std::size_t i = 0; i < spec.params.size(); ++i)
      nth(slot_of_param_, spec.params[i]) = static_cast<int>(i);
    units_.push_back(
        {static_cast<int>(units_.size()), spec, std::move(layout), whole, offloaded, {}, {}, {}});
  }
  offsets_.push_back(total);
  memory_ = std::make_shared<Memory>(
      Memory{{device.ledger(), memory::Tier::kDevice, memory::Kind::kWeights, Bytes()},
             collectives.allocate_growing(options.name + ".weights", std::max(total, kPage))});
  for (Unit& unit : units_) {
    const Bytes offset = nth(offsets_, unit.id);
    const Bytes own = unit.layout.shard_bytes();
    const Bytes held = own * place_.parts;
    if (unit.offloaded) {
      unit.slices = {nullptr, Bytes(), Bytes(), held};
      continue;
    }
    const auto local = memory_->buffer->local().subspan(
        offset.size(), local_bytes(unit.layout, unit.whole, place_.parts).size());
    if (unit.whole) unit.resident = local;
    unit.memory = memory_;
    const int before = unit.whole ? place_.index : place_.index % place_.parts;
    unit.shard = local.subspan((own * before).size(), own.size());
    unit.slices = {memory_->buffer.get(), offset, unit.whole ? held : Bytes(), held};
  }
}

void Weights::back(int unit) {
  const std::size_t begin = backed_;
  const auto end = static_cast<std::size_t>(unit) + 1;
  if (begin >= end) return;
  // At once: every growth costs a mapping, here and at every peer.
  if (offsets_[end] > offsets_[begin]) memory_->buffer->back(offsets_[end]);
  const auto added = std::span(units_).subspan(begin, end - begin);
  shards_.add(added);
  masters_.add(added);
  memory_->charge.grow(offsets_[end] - offsets_[begin]);
  backed_ = end;
}

void Weights::copy_for_offload(bool pinned) {
  back_all();
  const Bytes all = offsets_.back();
  if (all == Bytes()) return;
  offload::offload_all(device_, {{{memory_->buffer->local().first(all.size()), &offloaded_}}},
                       memory::Kind::kWeights, pinned);
}

void Weights::offload_states() {
  if (offloaded_ == nullptr) return;
  scratch_.reset();
  memory_->buffer->release();
  memory_->charge =
      memory::Charge(device_.ledger(), memory::Tier::kDevice, memory::Kind::kWeights, Bytes());
  for (Unit& unit : units_) unit.away = !unit.offloaded;
}

void Weights::reload_states() {
  if (offloaded_ == nullptr) return;
  const Bytes all = offsets_.back();
  memory_->buffer->back(all);
  offload::reload(device_, offloaded_, memory_->buffer->local().first(all.size()));
  memory_->charge.grow(all);
}

const Unit& Weights::trainable_unit_of(int param) const {
  const Unit& unit = unit_of(param);
  if (!unit.trains(param))
    throw UsageError(
        "parameter '{}' got a gradient, but the engine does not train it: it was frozen, or in no "
        "param group, when the graph's forward began",
        this->param(param).name);
  return unit;
}

std::pair<Numel, Numel> Weights::owned_range(int param) const {
  const Unit& unit = nth(units_, nth(unit_of_param_, param));
  const plan::Slot& slot = slot_of(param);
  const Numel shard_begin = unit.layout.shard() * place_.index;
  const Numel low = std::max(shard_begin, slot.offset);
  const Numel high = std::min(shard_begin + unit.layout.shard(), slot.end());
  if (low >= high) return {Numel(), Numel()};
  return {low - slot.offset, high - slot.offset};
}

void Weights::enqueue_store(int param, Numel begin, Numel numel, const std::byte* source,
                            DType source_dtype, OwedMasters* owed) {
  const plan::Slot& slot = slot_of(param);
  if (begin.value < 0 || numel.value < 0 || begin + numel > slot.numel)
    throw UsageError("elements [{}, {}) do not lie in parameter '{}' of {} elements", begin.value,
                     (begin + numel).value, this->param(param).name, slot.numel.value);
  const auto [owned_begin, owned_end] = owned_range(param);
  const Numel low = std::max(begin, owned_begin);
  const Numel high = std::min(begin + numel, owned_end);
  if (low >= high) return;
  const Unit& unit = unit_of(param);
  back(unit.id);
  const Numel shard_offset = slot.offset + low - unit.layout.shard() * place_.index;
  const std::byte* first = source + bytes_of(low - begin, source_dtype).size();
  if (source_dtype == unit.layout.dtype() || device_.device_accessible(first))
    store_piece(unit, shard_offset, high - low, first, source_dtype, owed);
  else
    store_through_scratch(unit, shard_offset, high - low, first, source_dtype);
}

void Weights::enqueue_store_everywhere(int param, Numel begin, Numel numel, const std::byte* source,
                                       DType source_dtype) {
  enqueue_store(param, begin, numel, source, source_dtype);
  const Unit& unit = unit_of(param);
  back(unit.id);  // also where this rank owns nothing of the parameter
  if (!unit.whole || unit.layout.world_size() == 1 || numel.value == 0) return;
  STRATA_ASSERT(source_dtype == unit.layout.dtype() || device_.device_accessible(source));
  const plan::Slot& slot = slot_of(param);
  const auto [owned_begin, owned_end] = owned_range(param);
  const auto write_range = [&](Numel low, Numel high) {
    if (low >= high) return;
    std::byte* target =
        unit.resident.data() + bytes_of(slot.offset + low, unit.layout.dtype()).size();
    write(target, unit.layout.dtype(), high - low,
          source + bytes_of(low - begin, source_dtype).size(), source_dtype);
  };
  if (owned_begin >= owned_end) {
    write_range(begin, begin + numel);
  } else {
    write_range(begin, std::min(begin + numel, owned_begin));
    write_range(std::max(begin, owned_end), begin + numel);
  }
}

void Weights::write(std::byte* target, DType dtype, Numel numel, const std::byte* source,
                    DType source_dtype) {
  device::Stream& stream = device_.compute_stream();
  if (dtype != source_dtype) {
    device_.cast(target, dtype, source, source_dtype, numel, stream);
    return;
  }
  const std::size_t bytes = bytes_of(numel, dtype).size();
  device_.copy({target, bytes}, {source, bytes}, stream);
}

void Weights::store_through_scratch(const Unit& unit, Numel shard_offset, Numel numel,
                                    const std::byte* source, DType source_dtype) {
  if (scratch_ == nullptr) scratch_ = device_.allocate(kScratch, memory::Kind::kStaging);
  const Numel largest(kScratch / size_of(source_dtype));
  for (Numel done; done < numel; done += largest) {
    const Numel count = std::min(largest, numel - done);
    const std::size_t bytes = bytes_of(count, source_dtype).size();
    const std::span<std::byte> there = scratch_->bytes().first(bytes);
    device_.copy(there, {source + bytes_of(done, source_dtype).size(), bytes},
                 device_.compute_stream());
    store_piece(unit, shard_offset + done, count, there.data(), source_dtype);
  }
}

// `source`: in the weights' dtype, or memory that kernels can read.
void Weights::store_piece(const Unit& unit, Numel shard_offset, Numel numel,
                          const std::byte* source, DType source_dtype, OwedMasters* owed) {
  const DType dtype = unit.layout.dtype();
  const bool has_masters = !masters_.blocks(unit.id).empty();
  const bool owes = has_masters && owed != nullptr && dtype == source_dtype;
  const auto store_range = [&](const WeightShards::Piece& piece) {
    const std::byte* from = source + bytes_of(piece.begin - shard_offset, source_dtype).size();
    std::byte* const weights = piece.bytes.data();
    if (weights != from) {  // else a unit that is whole was written in place
      write(weights, dtype, piece.end - piece.begin, from, source_dtype);
      if (dtype == source_dtype) from = weights;  // which need not be read over a link again
    }
    if (has_masters && !owes)
      masters_.make(unit.id, piece.begin, piece.end - piece.begin, from, source_dtype);
  };
  shards_.for_each(unit.id, shard_offset, shard_offset + numel, offload::Access::kReadWrite,
                   device_.compute_stream(), store_range);
  if (owes) owed->push_back({unit.id, shard_offset, shard_offset + numel});
}

void Weights::make_masters(OwedMasters& owed) {
  for (const auto& [index, begin, end] : take_joined(owed)) {
    const Unit& unit = nth(units_, index);
    const DType dtype = unit.layout.dtype();
    shards_.for_each(index, begin, end, offload::Access::kRead, device_.compute_stream(),
                     [&](const WeightShards::Piece& piece) {
                       masters_.make(unit.id, piece.begin, piece.end - piece.begin,
                                     piece.bytes.data(), dtype);
                     });
  }
}

}  // namespace strata::engine
