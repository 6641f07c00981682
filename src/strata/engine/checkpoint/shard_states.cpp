#include "strata/engine/checkpoint/shard_states.h"

#include <algorithm>

#include "strata/base/error.h"
#include "strata/format/manifest.h"
#include "strata/kernels/master_remainder.h"

namespace strata::engine {
namespace {

constexpr Bytes kScratchBytes = 4_MiB;

using format::kValue;

// The string of its own that lives as long as the program.
std::string_view kept(std::string_view kind) {
  for (const std::string_view known : {kValue, kExpAvg, kExpAvgSq}) {
    if (kind == known) return known;
  }
  STRATA_ASSERT(false);
}

}  // namespace

ShardStates::ShardStates(Engine& engine)
    : engine_(engine), adam_(dynamic_cast<AdamOptimizer*>(engine.optimizer())) {}

ShardStates::~ShardStates() {
  try {
    settle();
  } catch (const Error&) {
    // The device has failed; whoever waits for its work is told.
  }
}

void ShardStates::settle() {
  if (lease_ == nullptr && scratch_ == nullptr) return;
  engine_.device().compute_stream().synchronize();
  lease_.reset();
  leased_unit_ = -1;
}

bool ShardStates::has_moments(int unit) const {
  return adam_ != nullptr && engine_.weights().units()[static_cast<std::size_t>(unit)].trainable();
}

std::vector<std::string_view> ShardStates::storable_kinds_of(int unit) const {
  if (has_moments(unit)) return {kValue, kExpAvg, kExpAvgSq};
  return {kValue};
}

std::vector<std::string_view> ShardStates::kinds_of(int unit) const {
  if (has_moments(unit) && adam_->prepared()) return {kValue, kExpAvg, kExpAvgSq};
  return {kValue};
}

DType ShardStates::dtype_of(int unit, std::string_view kind) const {
  if (kind != kValue) return adam_->moment_dtype(unit);
  const Weights& weights = engine_.weights();
  const DType dtype = weights.units()[static_cast<std::size_t>(unit)].layout.dtype();
  const plan::MasterForm form = weights.master_form(unit);
  const bool beside = form == plan::MasterForm::kFloat32 || form == plan::MasterForm::kRemainder;
  return beside && dtype != DType::kFloat64 ? DType::kFloat32 : dtype;
}

std::span<std::byte> ShardStates::moment(int unit, std::string_view kind) {
  if (leased_unit_ != unit || leased_kind_ != kind) {
    settle();
    lease_ = adam_->lease_moment(
        unit, kind == kExpAvg ? AdamOptimizer::Moment::kFirst : AdamOptimizer::Moment::kSecond);
    STRATA_ASSERT(lease_ != nullptr);
    leased_unit_ = unit;
    leased_kind_ = kept(kind);
  }
  return lease_->bytes();
}

void ShardStates::enqueue_read(int unit, std::string_view kind, Numel first, Numel numel,
                               std::span<std::byte> target) {
  const Unit& of = engine_.weights().units()[static_cast<std::size_t>(unit)];
  const DType dtype = dtype_of(unit, kind);
  STRATA_ASSERT(Bytes(target.size()) == bytes_of(numel, dtype));
  if (kind == kValue && dtype != of.layout.dtype()) {
    read_masters(of, first, numel, target);
    return;
  }
  const std::span<std::byte> source = kind == kValue ? of.shard : moment(unit, kind);
  device::Device& device = engine_.device();
  device.copy(target, source.subspan(bytes_of(first, dtype).size(), target.size()),
              device.compute_stream());
}

void ShardStates::read_masters(const Unit& unit, Numel first, Numel numel,
                               std::span<std::byte> target) {
  device::Device& device = engine_.device();
  device::Stream& stream = device.compute_stream();
  if (leased_unit_ != unit.id || leased_kind_ != kValue) {
    settle();
    lease_ = engine_.weights().lease_master(unit.id);
    leased_unit_ = unit.id;
    leased_kind_ = kValue;
  }
  if (engine_.weights().master_form(unit.id) == plan::MasterForm::kFloat32) {
    const std::size_t begin = bytes_of(first, DType::kFloat32).size();
    device.copy(target, lease_->bytes().subspan(begin, target.size()), stream);
    return;
  }
  const auto remainder = kernels::remainder_over(lease_->bytes(), unit.layout.shard());
  if (device.device_accessible(target.data())) {
    device.join_masters({reinterpret_cast<float*>(target.data()), numel.size()}, unit.shard.data(),
                        remainder, first, stream);
    return;
  }
  through_scratch(numel, DType::kFloat32, [&](Numel done, Numel part, std::span<std::byte> there) {
    device.join_masters({reinterpret_cast<float*>(there.data()), part.size()}, unit.shard.data(),
                        remainder, first + done, stream);
    device.copy(target.subspan(bytes_of(done, DType::kFloat32).size(), there.size()), there,
                stream);
  });
}

void ShardStates::enqueue_store(int param, std::string_view kind, Numel begin, Numel numel,
                                const std::byte* source, DType source_dtype) {
  Weights& weights = engine_.weights();
  if (kind == kValue) {
    settle();  // of a master, which the store leases itself
    weights.enqueue_store(param, begin, numel, source, source_dtype);
    return;
  }
  const auto [owned_begin, owned_end] = weights.owned_range(param);
  const Numel low = std::max(begin, owned_begin);
  const Numel high = std::min(begin + numel, owned_end);
  if (low >= high) return;
  const Unit& unit = weights.unit_of(param);
  const Numel shard_begin = unit.layout.shard() * engine_.collectives().shard_place().index;
  const Numel at = weights.slot_of(param).offset + low - shard_begin;
  const std::byte* first = source + bytes_of(low - begin, source_dtype).size();
  const DType dtype = dtype_of(unit.id, kind);
  std::byte* target = moment(unit.id, kind).data() + bytes_of(at, dtype).size();
  device::Device& device = engine_.device();
  if (source_dtype == dtype) {
    const std::size_t bytes = bytes_of(high - low, dtype).size();
    device.copy({target, bytes}, {first, bytes}, device.compute_stream());
    return;
  }
  const Numel count = high - low;
  if (device.device_accessible(first)) {
    device.cast(target, dtype, first, source_dtype, count, device.compute_stream());
    return;
  }
  through_scratch(count, source_dtype, [&](Numel done, Numel part, std::span<std::byte> there) {
    device.copy(there, {first + bytes_of(done, source_dtype).size(), there.size()},
                device.compute_stream());
    device.cast(target + bytes_of(done, dtype).size(), dtype, there.data(), source_dtype, part,
                device.compute_stream());
  });
}

// In order on the compute stream, so that one scratch serves all pieces.
void ShardStates::through_scratch(
    Numel numel, DType dtype,
    const std::function<void(Numel done, Numel part, std::span<std::byte> scratch)>& queue) {
  if (scratch_ == nullptr)
    scratch_ = engine_.device().allocate(kScratchBytes, memory::Kind::kStaging);
  const Numel most(kScratchBytes / size_of(dtype));
  for (Numel done; done < numel; done += most) {
    const Numel part = std::min(most, numel - done);
    queue(done, part, scratch_->bytes().first(bytes_of(part, dtype).size()));
  }
}

}  // namespace strata::engine
