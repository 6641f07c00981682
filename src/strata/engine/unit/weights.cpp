#include "strata/engine/unit/weights.h"

#include <algorithm>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

constexpr Bytes kPage = 4_KiB;
constexpr Bytes kScratch = 4_MiB;

// Of an element: its fp32 master, and the arrays of its remainder.
constexpr int kWideBits = 32;
constexpr int kLowBits = 16;
constexpr int kHalfUpBits = 1;

// `parts`: shards that a rank holds of a unit that is not whole, its own among them.
Bytes local_bytes(const plan::FlatLayout& layout, bool whole, int parts) {
  return whole ? layout.flat_bytes() : layout.shard_bytes() * parts;
}

}  // namespace

Weights::Weights(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
                 const EngineOptions& options, plan::Masters masters,
                 comm::Collectives& collectives, device::Device& device,
                 offload::StateStore& states)
    : params_(params.begin(), params.end()),
      unit_of_param_(plan.unit_of_param),
      slot_of_param_(params.size()),
      masters_(masters),
      place_(collectives.shard_place()),
      device_(device),
      states_(states) {
  Bytes total;
  std::vector<Bytes> offsets;
  for (const plan::UnitSpec& spec : plan.units) {
    plan::FlatLayout layout(params_, spec.params, spec.dtype, place_.count);
    const bool whole = options.stage < 3 || place_.held_count() == 1 || spec.persistent;
    offsets.push_back(total);
    total += align_up(local_bytes(layout, whole, place_.parts), kPage);
    for (std::size_t i = 0; i < spec.params.size(); ++i) {
      slot_of_param_[static_cast<std::size_t>(spec.params[i])] = static_cast<int>(i);
    }
    units_.push_back({static_cast<int>(units_.size()), spec, std::move(layout), whole, {}, {}, {}});
  }
  charge_ = memory::Charge(device.ledger(), memory::Tier::kDevice, memory::Kind::kWeights, Bytes());
  memory_ = collectives.allocate_growing(options.name + ".weights", total);
  for (Unit& unit : units_) {
    const Bytes offset = offsets[static_cast<std::size_t>(unit.id)];
    const Bytes own = unit.layout.shard_bytes();
    const Bytes held = own * place_.parts;
    const auto local = memory_->local().subspan(
        offset.size(), local_bytes(unit.layout, unit.whole, place_.parts).size());
    if (unit.whole) unit.resident = local;
    const int before = unit.whole ? place_.index : place_.index % place_.parts;
    unit.shard = local.subspan((own * before).size(), own.size());
    unit.slices = {memory_.get(), offset, unit.whole ? held : Bytes(), held};
  }
  held_masters_.resize(units_.size());
}

void Weights::back(int unit) {
  const auto begin = master_ids_.size();
  const auto end = static_cast<std::size_t>(unit) + 1;
  if (begin >= end) return;
  const auto bytes_of_unit = [&](const Unit& u) {
    return align_up(local_bytes(u.layout, u.whole, place_.parts), kPage);
  };
  // At once: every growth costs a mapping, here and at every peer.
  memory_->back(units_[end - 1].slices.first_offset + bytes_of_unit(units_[end - 1]));
  const auto added = std::span(units_).subspan(begin, end - begin);
  std::vector<offload::BlockSpec> blocks;
  const auto add = [&](const Unit& u, const char* what, std::int64_t bits) {
    // Whole lines, so that they take as much one by one as together.
    const Bytes bytes = align_up(Bytes((u.layout.shard().value * bits + 7) / 8), 64_B);
    blocks.push_back({u.name() + what, bytes, memory::Kind::kMasterWeights});
  };
  for (const Unit& u : added) {
    const plan::MasterForm form = master_form(u.id);
    if (form == plan::MasterForm::kFloat32) add(u, ".master", kWideBits);
    if (form != plan::MasterForm::kRemainder) continue;
    add(u, ".master.low", kLowBits);
    add(u, ".master.halves_up", kHalfUpBits);
  }
  const std::vector<offload::BlockId> ids = states_.add_all(std::move(blocks));
  auto next = ids.begin();
  for (const Unit& u : added) {
    charge_.grow(bytes_of_unit(u));
    MasterIds of_unit;
    const plan::MasterForm form = master_form(u.id);
    if (form == plan::MasterForm::kFloat32) of_unit.wide = *next++;
    if (form == plan::MasterForm::kRemainder) {
      of_unit.low = *next++;
      of_unit.halves_up = *next++;
    }
    master_ids_.push_back(of_unit);
  }
}

std::vector<StateBlock> Weights::master_blocks(int unit) {
  back(unit);
  const MasterIds& ids = master_ids_[static_cast<std::size_t>(unit)];
  if (ids.wide >= 0) return {{ids.wide, kWideBits}};
  if (ids.low >= 0) return {{ids.low, kLowBits}, {ids.halves_up, kHalfUpBits}};
  return {};
}

void Weights::back_all() {
  back(static_cast<int>(units_.size()) - 1);
}

Weights::~Weights() = default;

const plan::Slot& Weights::slot_of(int param) const {
  const auto p = static_cast<std::size_t>(param);
  const Unit& unit = units_[static_cast<std::size_t>(unit_of_param_[p])];
  return unit.layout.slots()[static_cast<std::size_t>(slot_of_param_[p])];
}

std::pair<Numel, Numel> Weights::owned_range(int param) const {
  const Unit& unit =
      units_[static_cast<std::size_t>(unit_of_param_[static_cast<std::size_t>(param)])];
  const plan::Slot& slot = slot_of(param);
  const Numel shard_begin = unit.layout.shard() * place_.index;
  const Numel low = std::max(shard_begin, slot.offset);
  const Numel high = std::min(shard_begin + unit.layout.shard(), slot.end());
  if (low >= high) return {Numel(), Numel()};
  return {low - slot.offset, high - slot.offset};
}

void Weights::store(int param, Numel begin, Numel numel, const std::byte* source,
                    DType source_dtype) {
  enqueue_store(param, begin, numel, source, source_dtype);
  device_.compute_stream().synchronize();
}

void Weights::enqueue_store(int param, Numel begin, Numel numel, const std::byte* source,
                            DType source_dtype, OwedMasters* owed) {
  const plan::Slot& slot = slot_of(param);
  if (begin.value < 0 || numel.value < 0 || begin + numel > slot.numel) {
    throw UsageError(fmt::format("elements [{}, {}) do not lie in parameter '{}' of {} elements",
                                 begin.value, (begin + numel).value, this->param(param).name,
                                 slot.numel.value));
  }
  const auto [owned_begin, owned_end] = owned_range(param);
  const Numel low = std::max(begin, owned_begin);
  const Numel high = std::min(begin + numel, owned_end);
  if (low >= high) return;
  const Unit& unit = unit_of(param);
  back(unit.id);
  const Numel shard_offset = slot.offset + low - unit.layout.shard() * place_.index;
  const std::byte* first = source + bytes_of(low - begin, source_dtype).size();
  if (source_dtype == unit.layout.dtype() || device_.device_accessible(first)) {
    store_piece(unit, shard_offset, high - low, first, source_dtype, owed);
  } else {
    store_through_scratch(unit, shard_offset, high - low, first, source_dtype);
  }
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
  std::byte* weights = unit.shard.data() + bytes_of(shard_offset, dtype).size();
  if (weights != source) {  // else a unit that is whole was written in place
    write(weights, dtype, numel, source, source_dtype);
    if (dtype == source_dtype) source = weights;  // which need not be read over a link again
  }
  if (master_blocks(unit.id).empty()) return;
  if (owed != nullptr && dtype == source_dtype) {
    owed->add({unit.id, shard_offset, shard_offset + numel});
  } else {
    make_master(unit, shard_offset, numel, source, source_dtype);
  }
}

void Weights::make_masters(OwedMasters& owed) {
  for (const auto& [index, begin, end] : owed.take()) {
    const Unit& unit = units_[static_cast<std::size_t>(index)];
    const DType dtype = unit.layout.dtype();
    make_master(unit, begin, end - begin, unit.shard.data() + bytes_of(begin, dtype).size(), dtype);
  }
}

void Weights::make_master(const Unit& unit, Numel shard_offset, Numel numel,
                          const std::byte* source, DType source_dtype) {
  device::Stream& stream = device_.compute_stream();
  const bool wide = master_form(unit.id) == plan::MasterForm::kFloat32;
  const auto make = [&](const StateRange& range) {
    const Numel begin = std::max(range.first, shard_offset);
    const Numel count = std::min(range.end, shard_offset + numel) - begin;
    const std::byte* from = source + bytes_of(begin - shard_offset, source_dtype).size();
    if (wide) {
      device_.cast(range.bytes(0).data() + bytes_of(begin - range.first, DType::kFloat32).size(),
                   DType::kFloat32, from, source_dtype, count, stream);
    } else {
      device_.store_remainder(remainder_in(range), begin - range.first, from, source_dtype, count,
                              stream);
    }
  };
  for_each_master(unit.id, shard_offset, shard_offset + numel, offload::Access::kReadWrite, make);
}

void Weights::for_each_master(int unit, Numel begin, Numel end, offload::Access access,
                              const std::function<void(const StateRange&)>& work) {
  const auto index = static_cast<std::size_t>(unit);
  const Numel shard = units_[index].layout.shard();
  if (held_masters_[index] == nullptr) {
    for_each_range(states_, master_blocks(unit), shard, begin, end, access, work);
    return;
  }
  work({Numel(), shard, {&held_masters_[index], 1}});
}

std::span<std::byte> Weights::hold_master(int unit) {
  const plan::MasterForm form = master_form(unit);
  STRATA_ASSERT(form == plan::MasterForm::kShard || form == plan::MasterForm::kFloat32);
  const auto index = static_cast<std::size_t>(unit);
  if (form == plan::MasterForm::kShard) return units_[index].shard;
  auto& held = held_masters_[index];
  if (held == nullptr)
    held = states_.fetch(master_blocks(unit).front().id, offload::Access::kReadWrite);
  return held->bytes();
}

void Weights::round_masters(int unit) {
  round_masters(unit, Numel(), units_[static_cast<std::size_t>(unit)].layout.shard());
}

void Weights::round_masters(int unit, Numel begin, Numel end) {
  if (master_form(unit) != plan::MasterForm::kFloat32) return;
  const Unit& u = units_[static_cast<std::size_t>(unit)];
  const DType dtype = u.layout.dtype();
  for_each_master(unit, begin, end, offload::Access::kRead, [&](const StateRange& range) {
    const Numel low = std::max(range.first, begin);
    const Numel high = std::min(range.end, end);
    device_.cast(u.shard.data() + bytes_of(low, dtype).size(), dtype,
                 range.bytes(0).data() + bytes_of(low - range.first, DType::kFloat32).size(),
                 DType::kFloat32, high - low, device_.compute_stream());
  });
}

}  // namespace strata::engine
