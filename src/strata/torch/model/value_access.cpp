#include "strata/torch/model/value_access.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StreamGuard.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"

namespace strata::torch {
namespace {

// Tensors of torch's inference mode count no writes.
std::uint32_t version_of(const at::Tensor& tensor) {
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  return version.enabled() ? version.current_version() : 0;
}

}  // namespace

std::pair<Numel, Numel> range_in_shard(const engine::Weights& weights, int param, int index) {
  const Numel shard = weights.unit_of(param).layout.shard();
  const plan::Slot& slot = weights.slot_of(param);
  const Numel low = std::max(shard * index, slot.offset);
  const Numel high = std::min(shard * (index + 1), slot.end());
  if (low >= high) return {};
  return {low - slot.offset, high - slot.offset};
}

Numel offset_in_shard(engine::Engine& engine, int param, Numel element) {
  const engine::Weights& weights = engine.weights();
  const Numel shard_begin =
      weights.unit_of(param).layout.shard() * engine.collectives().shard_position().index;
  return weights.slot_of(param).offset + element - shard_begin;
}

void read_own(engine::Engine& engine, int param, Numel begin, Numel end, std::byte* target) {
  if (begin >= end) return;
  const engine::Unit& unit = engine.weights().unit_of(param);
  const Numel at = offset_in_shard(engine, param, begin);
  device::Device& device = engine.device();
  engine.weights().shards().for_each(
      unit.id, at, at + (end - begin), offload::Access::kRead, device.compute_stream(),
      [&](const engine::WeightShards::Piece& piece) {
        device.copy(
            {target + bytes_of(piece.begin - at, unit.layout.dtype()).size(), piece.bytes.size()},
            piece.bytes, device.compute_stream());
      });
}

ValueAccess::ValueAccess(engine::Engine& engine, ParameterSet& parameters, Scopes& scopes,
                         const engine::PrecisionConfig& precision)
    : engine_(engine),
      parameters_(parameters),
      scopes_(scopes),
      precision_(precision),
      versions_(static_cast<std::size_t>(parameters.size())) {
  for (const engine::Unit& unit : engine.weights().units()) note_versions(unit.id);
}

void ValueAccess::note_versions(int unit) {
  for (const int param : engine::nth(engine_.weights().units(), unit).spec.params)
    engine::nth(versions_, param) = version_of(parameters_.variable(param));
}

std::vector<int> ValueAccess::units_of(std::span<const int> params) const {
  std::set<int> units;
  for (const int param : params) units.insert(engine_.weights().unit_of(param).id);
  return {units.begin(), units.end()};
}

void ValueAccess::gather(std::span<const int> params) {
  for (const int unit : units_of(params)) {
    look_for_lost_writes(engine::nth(engine_.weights().units(), unit));
    engine_.gatherer().acquire(unit);
    Held& held = held_[unit];
    if (held.times++ == 0) held.others = parameters_.others(unit);
  }
  engine_.gatherer().wait_for_readers();  // the caller may write
}

void ValueAccess::release(std::span<const int> params, bool discard) {
  for (const int unit : units_of(params)) {
    Held& held = held_[unit];
    if (--held.times > 0) {  // the writes of an outer holder are its own to keep
      engine_.gatherer().release(unit);
      continue;
    }
    note_versions(unit);
    scopes_.end_reads(unit);
    if (parameters_.others(unit) > held.others) parameters_.keep_views(unit);
    discard ? engine_.gatherer().discard(unit) : engine_.gatherer().release(unit);
    // If ranks gather together, this does not yet ask whether this rank holds the unit: another one
    // may hold it.
    if (!engine_.gatherer().gathered(unit) &&
        (gathers_together() || parameters_.held_elsewhere(unit)))
      saved_.insert(unit);
  }
}

bool ValueAccess::gathers_together() const {
  const comm::Collectives& collectives = engine_.collectives();
  return !collectives.traits().one_sided && collectives.shard_position().held_count() > 1;
}

void ValueAccess::publish(std::span<const int> params, int root) {
  comm::Collectives& collectives = engine_.collectives();
  const int world = collectives.world_size();
  if (root < 0 || root >= world)
    throw UsageError("modifier_rank must be a rank of this job, 0 to {}; got {}", world - 1, root);
  for (const int param : params) require_publishable(param);
  for (const int param : params) {
    if (parameters_.replaced(param)) {
      if (collectives.rank() == root) parameters_.take_in(param);
      parameters_.put_back(param);
    }
    const engine::Unit& unit = engine_.weights().unit_of(param);
    const plan::Slot& slot = engine_.weights().slot_of(param);
    const auto flat = engine_.gatherer().flat(unit.id);
    const DType dtype = unit.layout.dtype();
    collectives.broadcast(
        flat.subspan(bytes_of(slot.offset, dtype).size(), bytes_of(slot.numel, dtype).size()),
        root);
  }
  engine_.adopt_flat(params);
  // Peers may gather from now on: a rank that waits here has finished its reads.
  collectives.barrier();
}

void ValueAccess::require_publishable(int param) const {
  if (!parameters_.replaced(param)) return;
  const at::Tensor& given = parameters_.variable(param);
  const at::Tensor& wanted = parameters_.full_view(param);
  const DType own = from_scalar_type(given.scalar_type());
  if (given.sizes() == wanted.sizes() && !given.is_meta() &&
      to_scalar_type(precision_.weight_dtype(own)) == wanted.scalar_type())
    return;
  throw UsageError(
      "parameter '{}' was given a tensor of another shape or dtype (param.data = tensor, or "
      "module.to(dtype)) when it was sharded already; build it so, before the engine or zero.Init "
      "takes it, or write param.data.copy_(tensor); wanted {} {}, found {} {}",
      engine_.weights().param(param).name, c10::toString(wanted.scalar_type()),
      fmt::join(wanted.sizes(), "x"), c10::toString(given.scalar_type()),
      fmt::join(given.sizes(), "x"));
}

void ValueAccess::require_own_memory() {
  const int lost = parameters_.lost();
  const int param = lost >= 0 ? lost : parameters_.find_changed();
  tell_of_conversion();
  if (param < 0) return warn_of_lost_write();
  for (int i = 0; i < parameters_.size(); ++i) parameters_.put_back(i);
  for (const engine::Unit& unit : engine_.weights().units()) note_versions(unit.id);
  throw UsageError(
      "parameter '{}' was given other memory (param.data = tensor, vector_to_parameters, set_()), "
      "which the engine neither reads nor updates; it has its own again now. Write values within "
      "strata.zero.GatheredParameters(params, modifier_rank=0), where such an assignment counts",
      engine_.weights().param(param).name);
}

void ValueAccess::tell_of_conversion() {
  const int param = parameters_.take_converted();
  if (param < 0 || std::exchange(told_of_conversion_, true) || engine_.collectives().rank() != 0)
    return;
  TORCH_WARN_ONCE(fmt::format(
      "parameter '{}' was converted (module.to(dtype) or .to(memory_format=...)) when the engine, "
      "or zero.Init, had it already; it stays {}, and {} as the configuration says. This is said "
      "once",
      engine_.weights().param(param).name,
      engine_.weights().param(param).channels_last ? "channels_last" : "contiguous",
      c10::toString(parameters_.full_view(param).scalar_type())));
}

// Looks for writes since the last look at the unit, none of which a holder of it has made.
void ValueAccess::look_for_lost_writes(const engine::Unit& unit) {
  const auto held = held_.find(unit.id);
  if (unit.whole || (held != held_.end() && held->second.times > 0)) return;
  for (const int param : unit.spec.params) {
    const std::uint32_t found = version_of(parameters_.variable(param));
    const bool written = std::exchange(engine::nth(versions_, param), found) != found;
    if (written && lost_write_ < 0) lost_write_ = param;
  }
}

void ValueAccess::warn_of_lost_write() {
  for (const engine::Unit& unit : engine_.weights().units()) look_for_lost_writes(unit);
  const int param = std::exchange(lost_write_, -1);
  if (param < 0 || !warned_of_.insert(param).second) return;
  // No error: torch counts a write, too, where set_() gives a tensor the memory that it has.
  TORCH_WARN(fmt::format(
      "parameter '{}' was written to (clamp_(), copy_(), an initialization) outside of "
      "strata.zero.GatheredParameters; at ZeRO stage 3 the values are in the ranks' shards, so a "
      "write that changes them is lost. Write within strata.zero.GatheredParameters(params, "
      "modifier_rank=0)",
      engine_.weights().param(param).name));
}

bool ValueAccess::read(int param) {
  if (gathered(param)) return false;
  scopes_.read(engine_.weights().unit_of(param).id);
  engine_.gatherer().wait_for_readers();
  return true;
}

void ValueAccess::gather_what_was_saved() {
  const std::set<int> units = std::exchange(saved_, {});
  if (units.empty()) return;
  std::vector<double> wanted;
  for (const int unit : units)
    wanted.push_back(!engine_.gatherer().gathered(unit) && parameters_.held_elsewhere(unit) ? 1.0
                                                                                            : 0.0);
  // If a script holds a unit on one rank, all ranks gather it; otherwise ranks would wait in
  // gathers of different units.
  if (gathers_together()) engine_.collectives().all_reduce(wanted, comm::ReduceOp::kMax);
  auto wants = wanted.begin();
  for (const int unit : units) {
    if (*wants++ > 0.0) scopes_.read(unit);
  }
}

at::Tensor ValueAccess::local_part(int param) const {
  const auto [begin, end] = engine_.weights().owned_range(param);
  const DType dtype = engine_.weights().unit_of(param).layout.dtype();
  at::Tensor values =
      at::empty({(end - begin).value},
                at::TensorOptions().dtype(to_scalar_type(dtype)).device(parameters_.place()));
  read_own(engine_, param, begin, end, mutable_bytes(values).data());
  return values;
}

void ValueAccess::note_step() {
  const std::lock_guard lock(step_mutex_);
  step_ = {std::this_thread::get_id(), current_stream(parameters_.place())};
}

void ValueAccess::complete(int unit) {
  std::optional<Step> step;
  {
    const std::lock_guard lock(step_mutex_);
    step = step_;
  }
  if (!step) {
    engine_.gatherer().complete(unit);
    return;
  }
  if (step->thread != std::this_thread::get_id()) parameters_.await_no_more();
  if (current_stream(parameters_.place()) == step->stream) {
    engine_.gatherer().complete(unit);
    return;
  }
  // The step's stream waits, since the model computes there. The host waits as well, since the
  // reader's stream does not.
  const c10::StreamGuard on_the_steps_stream(step->stream);
  engine_.gatherer().complete(unit);
  engine_.device().compute_stream().synchronize();
}

}  // namespace strata::torch
