#include "strata/engine/reduce/reducer.h"

#include <optional>
#include <set>
#include <utility>

#include "strata/engine/gather/gatherer.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

// The bytes of gradients that may be under reduction before the next ones are written. With tiles
// the device has no room for more than the gradient that is being written. The units of a scope
// become complete close to each other: with less room than they take, the model would wait for
// reductions that have only begun.
Bytes most_reducing(const EngineOptions& options, std::span<const Unit> units, Bytes scope) {
  const bool tiles = std::ranges::any_of(units, [](const Unit& unit) { return unit.spec.tile(); });
  return std::max(tiles ? Bytes() : options.max_reducing, scope);
}

}  // namespace

void GradientEdits::drop_all() {
  if (!reducer_.record_.collects()) return;
  reducer_.require_none_early();
  reducer_.writes_.drop();
  // Shard groups add up their parts later, also with ranks that have dropped nothing: zeroes then.
  GradientShards& shards = reducer_.shards_;
  std::vector<int> parts;
  for (const Unit& unit : reducer_.units_) {
    if (reducer_.collectives_.shard_position().groups > 1 && shards.filled(unit.id))
      parts.push_back(unit.id);
  }
  shards.clear();
  for (const int unit : parts) shards.change(unit);
  reducer_.record_.record_all_dropped();
}

void GradientEdits::drop(int unit, int slot, bool came) {
  reducer_.require_none_early();
  reducer_.writes_.drop(unit, slot);
  if (reducer_.shards_.filled(unit)) write(unit, slot, nullptr);
  reducer_.record_.record_dropped(reducer_.slot(unit, slot).param, came);
}

void GradientEdits::store(int unit, int slot, const float* values) {
  reducer_.writes_.drop(unit, slot);
  write(unit, slot, values);
  reducer_.record_.record_gradient(reducer_.slot(unit, slot).param);
}

void GradientEdits::write(int unit, int slot, const float* values) {
  device::Device& device = reducer_.device_;
  device::Stream& stream = device.compute_stream();
  const DType dtype = reducer_.shards_.dtype();
  const std::span<std::byte> kept = reducer_.shards_.change(unit);
  const int rank = reducer_.collectives_.shard_position().index;
  for (const plan::ShardRange& piece : nth(reducer_.units_, unit).layout.pieces(rank)) {
    if (piece.slot != slot) continue;
    const Numel numel = piece.param_end - piece.param_begin;
    const std::span<std::byte> target =
        kept.subspan(bytes_of(piece.shard_offset, dtype).size(), bytes_of(numel, dtype).size());
    if (values == nullptr) {
      device.fill_zero(target, stream);
    } else {
      device.cast(target.data(), dtype, reinterpret_cast<const std::byte*>(values), DType::kFloat32,
                  numel, stream);
    }
  }
}

Reducer::Reducer(std::vector<Unit>& units, comm::Collectives& collectives, device::Device& device,
                 StepRecorder& recorder, const EngineOptions& options,
                 std::span<const plan::ScopeSpec> scopes)
    : units_(units),
      collectives_(collectives),
      device_(device),
      recorder_(recorder),
      options_(options),
      largest_scope_(largest_scope(scopes, units, ScopeUnits::kAll) * 3 / 2),
      max_reducing_(most_reducing(options, units, largest_scope_)),
      measures_(options.wants_late_norm(device.runs_ahead()) &&
                collectives.traits().gathers_on_device &&
                options.accumulation_dtype == DType::kFloat32),
      buffers_(make_gradient_buffers(options.name, collectives, device.ledger())),
      shards_(units, device, options.accumulation_dtype, options.gradient_tier,
              options.gradients_in_16 && collectives.world_size() == 1, recorder),
      writes_(units, collectives, device, buffers_, options, max_reducing_, largest_scope_),
      arrivals_(units, collectives, writes_.largest() + max_reducing_),
      in_flight_(shards_, recorder),
      adds_up_later_(collectives.shard_position().groups > 1 &&
                     options_.accumulation_dtype == DType::kFloat32 &&
                     std::ranges::all_of(units,
                                         [this](const Unit& unit) {
                                           return unit.gradient_tier(options_.gradient_tier) ==
                                                  memory::Tier::kDevice;
                                         })),
      of_group_(units.size()),
      record_(units) {}

void Reducer::begin_backward(BackwardPass pass, std::span<const int> first_uses,
                             std::function<void(int unit)> summed) {
  pass_ = pass;
  summed_ = summed != nullptr;
  if (summed_) {
    in_flight_.notify([this, summed = std::move(summed)](int unit) {
      const auto& slots = nth(units_, unit).layout.slots();
      if (std::ranges::all_of(slots, [this](const plan::Slot& slot) {
            return slot.numel.value == 0 || record_.got(slot.param);
          }))
        summed(unit);
    });
  }
  record_.begin_pass();
  if (pass == BackwardPass::kKeeps) writes_.widen();
  arrivals_.begin_pass(first_uses);
  writes_.end_pushing();
  // Narrow sums arrive wide, in memory of their own, which only buffers keep few of.
  if (pass != BackwardPass::kKeeps && !writes_.wide() &&
      options_.accumulation_dtype == DType::kFloat32) {
    std::vector<int> pushed = arrivals_.order();
    std::erase_if(pushed, [this](int unit) { return !is_pushed(unit); });
    writes_.begin_pushing(pushed);
  }
}

void Reducer::add(int unit, int slot, const std::byte* gradient, DType dtype,
                  std::shared_ptr<const void> owner) {
  nth(units_, unit).require_not_early();
  const auto index = static_cast<std::size_t>(slot);
  const plan::Slot& place = this->slot(unit, slot);
  record_.record_gradient(place.param);
  const bool alone =
      is_pushed(unit) && !arrivals_.reduced(unit) && arrivals_.only_one_expected(unit, index);
  if (!alone || !writes_.push(unit, slot, gradient, dtype, owner)) {
    open_buffer(unit);
    writes_.write(unit, slot, gradient, dtype);
    writes_.hold_until_written(std::move(owner), bytes_of(place.numel, dtype));
  }
  record_written(unit, index);
}

GradientTarget Reducer::begin_add(int unit, int slot) {
  STRATA_ASSERT(!is_pushed(unit));
  nth(units_, unit).require_not_early();
  record_.record_gradient(this->slot(unit, slot).param);
  open_buffer(unit);
  return writes_.place(unit, slot);
}

void Reducer::start_reduction(int unit) {
  const bool late = arrivals_.reduced(unit);
  const bool pushed = writes_.pushing() && !late && is_pushed(unit);
  if (!pushed) open_buffer(unit);
  const std::optional<std::size_t> unused =
      pushed ? writes_.push_missing(unit) : writes_.write_missing(unit);
  const Unit& u = nth(units_, unit);
  if (unused && !late) record_.record_unused(u.layout.slots()[*unused].param);
  const Bytes bytes = writes_.bytes(unit);
  if (late) in_flight_.finish(unit);
  // One rank's sum is what was written.
  const bool is_16 = collectives_.world_size() == 1 && size_of(writes_.dtype(unit)) == 2_B;
  const GradientShards::Target target = shards_.begin(unit, is_16);
  comm::Reduction reduction;
  reduction.result = target.result;
  reduction.accumulate = target.accumulate;
  reduction.replicas = replicas_of(unit);
  reduction.scale =
      options_.sum_gradients ? 1.0F : 1.0F / static_cast<float>(collectives_.world_size());
  auto recording = recorder_.begin_transfer(Activity::kReduce, unit, bytes);
  auto work = writes_.reduce(unit, reduction, pushed);
  device::Stream* const stream = collectives_.stream(comm::Traffic::kReductions);
  if (measures_ && pass_ == BackwardPass::kLast && stream != nullptr)
    shards_.measure(unit, *stream);
  recorder_.started(recording, *work);
  ++recorder_.counts().reductions;
  recorder_.counts().reduced += bytes;
  arrivals_.record_reduced(unit);
  in_flight_.add(unit, writes_.release_buffer(unit, pushed), std::move(work), std::move(recording));
}

// Depends on the passes alone, so that it is the same on every rank.
comm::Replicas Reducer::replicas_of(int unit) {
  if (!adds_up_later_) return comm::Replicas::kSum;
  const auto index = static_cast<std::size_t>(unit);
  const bool last = pass_ == BackwardPass::kLast;
  const bool of_group = of_group_[index];
  of_group_[index] = !last;
  if (!last) return comm::Replicas::kLater;
  return of_group ? comm::Replicas::kSumAll : comm::Replicas::kSum;
}

void Reducer::end_backward() {
  if (pass_ == BackwardPass::kKeeps) {
    writes_.compute_follows();
    return;
  }
  record_.record_reduced_pass();
  while (const std::optional<int> unit = arrivals_.next()) start_reduction(*unit);
  in_flight_.finish();
  if (std::exchange(summed_, false)) in_flight_.notify({});
  writes_.end_pushing();
  writes_.compute_follows();
  buffers_.end_round();
  writes_.set_narrow();
  arrivals_.end_pass();
}

std::exception_ptr Reducer::abandon_backward() noexcept {
  FirstError error;
  writes_.end_pushing();
  error.attempt([this] { in_flight_.abandon(); });
  if (std::exchange(summed_, false)) in_flight_.notify({});
  error.keep(writes_.abandon().get());
  forget_step();
  return error.get();
}

std::vector<int> Reducer::params_without_gradient() const {
  std::vector<int> result;
  for (const Unit& unit : units_) {
    if (!unit.trainable()) continue;
    for (const plan::Slot& slot : unit.layout.slots()) {
      if (slot.numel.value > 0 && !record_.got(slot.param)) result.push_back(slot.param);
    }
  }
  std::ranges::sort(result);
  return result;
}

std::vector<int> Reducer::late_units() const {
  std::vector<int> result;
  for (const int unit : arrivals_.order()) {
    if (writes_.has_buffer(unit)) result.push_back(unit);
  }
  return result;
}

// Which units are late is known to each rank only for itself; all must reduce the union.
void Reducer::reduce_late() {
  std::set<int> late;
  for (const std::string& text : collectives_.all_gather_text(text_of_numbers(late_units()))) {
    for (const int unit : numbers_of_text(text)) late.insert(unit);
  }
  for (const int unit : late) start_reduction(unit);
  in_flight_.finish();
}

void Reducer::complete_groups() {
  pass_ = BackwardPass::kLast;
  std::vector<int> units = arrivals_.order();
  std::erase_if(units, [this](int unit) { return !nth(of_group_, unit); });
  for (const int unit : units) start_reduction(unit);
  in_flight_.finish();
}

void Reducer::offload_states(bool shards, bool buffers, bool pinned) {
  // Reductions are complete; what measures them may still run.
  if (device::Stream* const stream = collectives_.stream(comm::Traffic::kReductions))
    stream->synchronize();
  if (buffers) writes_.offload_states(pinned);
  if (shards) shards_.offload_states(pinned);
}

}  // namespace strata::engine
