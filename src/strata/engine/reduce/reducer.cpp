#include "strata/engine/reduce/reducer.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

Bytes bytes_of_buffer(const GradientBuffers::Buffer& buffer) {
  return buffer == nullptr ? Bytes() : Bytes(buffer->memory->local().size());
}

// So much of complete units may wait for one that is not: what may be under reduction, and a unit.
Bytes most_waiting(std::span<const Unit> units, const GradientWrites& writes, Bytes max_reducing) {
  Bytes largest;
  for (const Unit& unit : units) {
    if (unit.trainable()) largest = std::max(largest, writes.bytes(unit.id));
  }
  return largest + max_reducing;
}

}  // namespace

void ReductionsInFlight::add(int unit, GradientBuffers::Buffer buffer,
                             std::unique_ptr<comm::Work> work, StepRecorder::Recording recording) {
  held_ += bytes_of_buffer(buffer);
  pending_.push_back({unit, std::move(buffer), std::move(work), std::move(recording)});
}

void ReductionsInFlight::progress() {
  if (!pending_.empty()) pending_.back().work->done();
}

void ReductionsInFlight::free_buffers(Bytes at_most) {
  for (Pending& pending : pending_) {
    if (held_ <= at_most) break;
    if (pending.buffer == nullptr) continue;
    recorder_.measure(Activity::kReduceWait, pending.unit,
                      [&] { pending.work->wait_for_readers(); });
    held_ -= bytes_of_buffer(pending.buffer);
    buffers_.give_back(std::move(pending.buffer));
  }
  while (!pending_.empty() && pending_.front().buffer == nullptr && pending_.front().work->done())
    settle_front();
}

void ReductionsInFlight::settle_front() {
  Pending& pending = pending_.front();
  recorder_.measure(Activity::kReduceWait, pending.unit, [&] { pending.work->wait(); });
  recorder_.end(pending.recording);
  shards_.settle(pending.unit);
  pending_.pop_front();
}

void ReductionsInFlight::finish(int unit) {
  const auto last = std::find_if(pending_.rbegin(), pending_.rend(),
                                 [unit](const Pending& pending) { return pending.unit == unit; });
  for (auto left = pending_.rend() - last; left > 0; --left) {
    Pending& pending = pending_.front();
    if (pending.buffer != nullptr) {
      recorder_.measure(Activity::kReduceWait, pending.unit,
                        [&] { pending.work->wait_for_readers(); });
      held_ -= bytes_of_buffer(pending.buffer);
      buffers_.give_back(std::move(pending.buffer));
    }
    settle_front();
  }
}

void ReductionsInFlight::finish() {
  free_buffers(Bytes());
  while (!pending_.empty()) settle_front();
}

void ReductionsInFlight::abandon() {
  for (Pending& pending : pending_) {
    pending.work.reset();  // waits, drops its error
    buffers_.give_back(std::move(pending.buffer));
  }
  pending_.clear();
  held_ = Bytes();
}

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
  const plan::FlatLayout& layout = nth(units_, unit).layout;
  writes_.drop(unit, slot);
  if (shards_.filled(unit)) write(unit, slot, nullptr);
  record_.record_dropped(nth(layout.slots(), slot).param, came);
}

void GradientEdits::store(int unit, int slot, const float* values) {
  const plan::FlatLayout& layout = nth(units_, unit).layout;
  writes_.drop(unit, slot);
  write(unit, slot, values);
  record_.record_gradient(nth(layout.slots(), slot).param);
}

void GradientEdits::write(int unit, int slot, const float* values) {
  const plan::FlatLayout& layout = nth(units_, unit).layout;
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

Reducer::Reducer(std::vector<Unit>& units, comm::Collectives& collectives, device::Device& device,
                 StepRecorder& recorder, ReducerOptions options)
    : units_(units),
      collectives_(collectives),
      recorder_(recorder),
      options_(std::move(options)),
      buffers_(options_.name, collectives, device.ledger()),
      shards_(units, device, options_.accumulation_dtype, options_.gradient_tier, recorder),
      writes_(units, collectives, device, buffers_,
              {options_.name, options_.reduce_dtype, options_.max_reducing, options_.max_held}),
      arrivals_(units, collectives, most_waiting(units, writes_, options_.max_reducing)),
      in_flight_(buffers_, shards_, recorder),
      adds_up_later_(collectives.shard_position().groups > 1 &&
                     options_.accumulation_dtype == DType::kFloat32 &&
                     std::ranges::all_of(units,
                                         [this](const Unit& unit) {
                                           return unit.gradient_tier(options_.gradient_tier) ==
                                                  memory::Tier::kDevice;
                                         })),
      of_group_(units.size()),
      record_(units),
      edits_(units, collectives, device, shards_, writes_, record_) {}

void Reducer::expect(int unit, int slot) {
  writes_.add(unit);
  arrivals_.expect(unit, static_cast<std::size_t>(slot),
                   most_waiting(units_, writes_, options_.max_reducing));
}

void Reducer::begin_backward(BackwardPass pass, std::span<const int> first_uses) {
  pass_ = pass;
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

// Reductions end here, and not where the next one starts: until another buffer is needed they may
// take their time.
void Reducer::open_buffer(int unit) {
  if (writes_.has_buffer(unit)) return;
  in_flight_.free_buffers(std::max(options_.max_reducing - writes_.bytes(unit), Bytes()));
  writes_.open_buffer(unit);
}

void Reducer::add(int unit, int slot, const std::byte* gradient, DType dtype,
                  std::shared_ptr<const void> owner) {
  const auto index = static_cast<std::size_t>(slot);
  const plan::Slot& place = nth(units_, unit).layout.slots()[index];
  record_gradient(unit, index);
  const bool alone =
      is_pushed(unit) && !arrivals_.reduced(unit) && arrivals_.only_one_expected(unit, index);
  if (!alone || !writes_.push(unit, slot, gradient, dtype)) {
    open_buffer(unit);
    writes_.write(unit, slot, gradient, dtype);
  }
  writes_.hold_until_written(std::move(owner), bytes_of(place.numel, dtype));
  note_written(unit, index);
}

GradientTarget Reducer::begin_add(int unit, int slot) {
  STRATA_ASSERT(!is_pushed(unit));
  record_gradient(unit, static_cast<std::size_t>(slot));
  open_buffer(unit);
  return writes_.place(unit, slot);
}

void Reducer::end_add(int unit, int slot) {
  writes_.wrote(unit, slot);
  note_written(unit, static_cast<std::size_t>(slot));
}

void Reducer::record_gradient(int unit, std::size_t slot) {
  record_.record_gradient(nth(units_, unit).layout.slots()[slot].param);
}

void Reducer::note_written(int unit, std::size_t slot) {
  in_flight_.progress();
  if (!arrivals_.note(unit, slot, writes_.bytes(unit)) || pass_ == BackwardPass::kKeeps) return;
  while (const std::optional<int> ready = arrivals_.next_ready()) start_reduction(*ready);
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
  const GradientShards::Target target = shards_.begin(unit);
  comm::Reduction reduction;
  reduction.result = target.result;
  reduction.accumulate = target.accumulate;
  reduction.replicas = replicas_of(unit);
  reduction.scale = options_.sum ? 1.0F : 1.0F / static_cast<float>(collectives_.world_size());
  auto recording = recorder_.begin_transfer(Activity::kReduce, unit, bytes);
  auto work = writes_.reduce(unit, reduction, pushed);
  device::Stream* const stream = collectives_.contribution_stream();
  if (options_.measures && pass_ == BackwardPass::kLast && stream != nullptr)
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
  writes_.end_pushing();
  writes_.compute_follows();
  buffers_.end_pass();
  writes_.set_narrow();
  arrivals_.end_pass();
}

std::exception_ptr Reducer::abandon_backward() noexcept {
  FirstError error;
  writes_.end_pushing();
  error.attempt([this] { in_flight_.abandon(); });
  error.keep(writes_.abandon().get());
  forget_step();
  return error.get();
}

void Reducer::drop_gradients() {
  writes_.drop();
  forget_step();
}

void Reducer::forget_step() {
  shards_.clear();
  std::fill(of_group_.begin(), of_group_.end(), false);
  record_.forget();
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
  std::vector<bool> late(units_.size());
  for (const std::string& text : collectives_.all_gather_text(text_of_numbers(late_units()))) {
    for (const int unit : numbers_of_text(text)) nth(late, unit) = true;
  }
  std::vector<int> units;
  for (std::size_t i = 0; i < late.size(); ++i) {
    if (late[i]) units.push_back(static_cast<int>(i));
  }
  reduce_once_more(units);
}

void Reducer::reduce_once_more(std::span<const int> units) {
  for (const int unit : units) start_reduction(unit);
  in_flight_.finish();
}

void Reducer::complete_groups() {
  pass_ = BackwardPass::kLast;
  std::vector<int> units;
  for (const int unit : arrivals_.order()) {
    if (nth(of_group_, unit)) units.push_back(unit);
  }
  if (!units.empty()) reduce_once_more(units);
}

void Reducer::offload_states(bool shards, bool buffers, bool pinned) {
  // Reductions are complete; what measures them may still run.
  if (device::Stream* const stream = collectives_.contribution_stream()) stream->synchronize();
  if (buffers) writes_.offload_states(pinned);
  if (shards) shards_.offload_states(pinned);
}

void Reducer::reload_states() {
  writes_.reload_states();
  shards_.reload_states();
}

}  // namespace strata::engine
