#include "strata/engine/reduce/gradient_writes.h"

#include <algorithm>
#include <utility>

namespace strata::engine {

GradientWrites::GradientWrites(std::vector<Unit>& units, comm::Collectives& collectives,
                               device::Device& device, GradientBuffers& buffers,
                               const EngineOptions& options, Bytes max_pushed, Bytes max_held)
    : units_(units),
      collectives_(collectives),
      device_(device),
      buffers_(buffers),
      reduce_dtype_(options.reduce_dtype),
      inbox_(options.name, units, collectives, device, max_pushed),
      buffers_of_(units.size()),
      stream_(device.runs_ahead() ? collectives.contribution_stream() : nullptr),
      held_(device, max_held) {
  if (device.runs_ahead() && stream_ == nullptr) {
    own_stream_ = device.create_stream();
    stream_ = own_stream_.get();
  }
  for (const Unit& unit : units_) {
    if (!unit.trainable()) continue;
    of(unit.id).written.assign(unit.layout.slots().size(), false);
    if (unit.spec.tile()) largest_tile_ = std::max(largest_tile_, unit.layout.padded());
  }
}

DType GradientWrites::dtype(int unit, bool wide) const {
  const DType own = layout(unit).dtype();
  const bool exact = !wide && collectives_.traits().sums_in_fp32 && is_floating(own) &&
                     size_of(own) < size_of(reduce_dtype_);
  return exact ? own : reduce_dtype_;
}

Bytes GradientWrites::largest() const {
  Bytes largest;
  for (const Unit& unit : units_) {
    if (unit.trainable()) largest = std::max(largest, bytes(unit.id));
  }
  return largest;
}

void GradientWrites::widen() {
  if (std::exchange(wide_, true)) return;
  compute_follows();
  for (const Unit& unit : units_) {
    UnitBuffer& b = of(unit.id);
    const DType before = dtype(unit.id, false);
    const DType after = dtype(unit.id, true);
    if (b.buffer == nullptr || after == before) continue;
    auto widened = take_buffer(unit.id);
    device_.cast(widened->bytes().data(), after, b.buffer->bytes().data(), before,
                 unit.layout.padded(), device_.compute_stream());
    b.buffer = std::move(widened);
  }
}

void GradientWrites::compute_follows() {
  held_.let_go();
  // Skip the wait if we queued nothing: the stream is the collectives', which may be busy.
  if (std::exchange(compute_is_behind_, false) && stream_ != nullptr)
    device_.compute_stream().wait_for(*stream_->record());
}

// Tiles share buffers, whatever the length of each: there is a free one wherever there was one.
GradientBuffers::Lease GradientWrites::take_buffer(int unit) {
  const bool tile = nth(units_, unit).spec.tile();
  return buffers_.acquire(tile ? bytes_of(largest_tile_, dtype(unit)) : bytes(unit));
}

void GradientWrites::open_buffer(int unit) {
  UnitBuffer& b = of(unit);
  const DType type = dtype(unit);
  b.buffer = take_buffer(unit);
  follow_compute();
  std::fill(b.written.begin(), b.written.end(), false);
  // Padding is never written by a gradient; it must be zero, since it takes part in the reduction.
  const std::span<std::byte> memory = b.buffer->bytes();
  const auto zero = [&](Numel begin, Numel end) {
    const std::size_t from = bytes_of(begin, type).size();
    device_.fill_zero(memory.subspan(from, bytes_of(end, type).size() - from), stream());
  };
  Numel end;
  for (const plan::Slot& slot : layout(unit).slots()) {
    if (slot.offset > end) zero(end, slot.offset);
    end = slot.end();
  }
  if (layout(unit).padded() > end) zero(end, layout(unit).padded());
}

void GradientWrites::write(int unit, int slot_index, const std::byte* gradient, DType dtype_here) {
  UnitBuffer& b = of(unit);
  const auto index = static_cast<std::size_t>(slot_index);
  const plan::Slot& slot = layout(unit).slots()[index];
  follow_compute();
  std::byte* const target = place_of(unit, slot).data();
  if (b.written[index]) {
    device_.accumulate(target, dtype(unit), gradient, dtype_here, slot.numel, stream());
  } else {
    device_.cast(target, dtype(unit), gradient, dtype_here, slot.numel, stream());
    b.written[index] = true;
  }
}

GradientTarget GradientWrites::place(int unit, int slot) {
  UnitBuffer& b = of(unit);
  const auto index = static_cast<std::size_t>(slot);
  device::Stream& compute = device_.compute_stream();
  if (const auto read = std::exchange(b.buffer->read, nullptr)) compute.wait_for(*read);
  if (b.written[index] && stream_ != nullptr) compute.wait_for(*stream_->record());
  return {place_of(unit, layout(unit).slots()[index]).data(), dtype(unit), b.written[index]};
}

bool GradientWrites::push(int unit, int slot, const std::byte* gradient, DType dtype_here) {
  if (!inbox_.takes(unit) || dtype_here != dtype(unit)) return false;
  follow_compute();
  compute_is_behind_ = true;
  inbox_.write(unit, slot, gradient);
  return true;
}

std::optional<std::size_t> GradientWrites::write_missing(int unit) {
  UnitBuffer& b = of(unit);
  std::optional<std::size_t> first;
  for (std::size_t i = 0; i < b.written.size(); ++i) {
    if (b.written[i]) continue;
    const plan::Slot& slot = layout(unit).slots()[i];
    if (!first && nth(units_, unit).expects(slot)) first = i;
    device_.fill_zero(place_of(unit, slot), stream());
  }
  return first;
}

std::optional<std::size_t> GradientWrites::push_missing(int unit) {
  UnitBuffer& b = of(unit);
  const std::span<const plan::Slot> slots = layout(unit).slots();
  std::optional<std::size_t> first;
  follow_compute();  // which may have read the shard that is written next
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const auto slot = static_cast<int>(i);
    // If a gradient was pushed, a gradient in its buffer came later, and stays.
    if (inbox_.has(unit, slot)) continue;
    if (b.buffer != nullptr && b.written[i]) {
      inbox_.write(unit, slot, place_of(unit, slots[i]).data());
      b.written[i] = false;
    } else {
      if (!first && nth(units_, unit).expects(slots[i])) first = i;
      inbox_.write(unit, slot, nullptr);
    }
  }
  compute_is_behind_ = true;
  return first;
}

std::unique_ptr<comm::Work> GradientWrites::reduce(int unit, comm::Reduction reduction,
                                                   bool pushed) {
  reduction.dtype = dtype(unit);
  reduction.writer = stream_;
  if (pushed) return inbox_.reduce(unit, reduction);
  GradientBuffer& buffer = *of(unit).buffer;
  reduction.source = buffer.memory.get();
  auto work = collectives_.reduce_scatter(reduction, nth(units_, unit).name());
  // Work::wait_for_readers() need not wait for this rank's own reading, which runs in this stream:
  // what write() puts there next comes after it anyway, but place() has to know.
  if (stream_ != nullptr) buffer.read = stream_->record();
  return work;
}

void GradientWrites::drop() {
  compute_follows();
  for (UnitBuffer& b : buffers_of_) {
    b.buffer.reset();
    b.offloaded.reset();
  }
}

void GradientWrites::offload_states(bool pinned) {
  compute_follows();
  std::vector<offload::OffloadedMemory> memory;
  for (UnitBuffer& b : buffers_of_) {
    if (b.buffer != nullptr) memory.push_back({b.buffer->bytes(), &b.offloaded});
  }
  offload::offload_all(device_, memory, memory::Kind::kGradients, pinned);
  for (UnitBuffer& b : buffers_of_) b.buffer.reset();
  buffers_.trim();
  inbox_.free();
}

void GradientWrites::reload_states() {
  for (const Unit& unit : units_) {
    UnitBuffer& b = of(unit.id);
    if (b.offloaded == nullptr) continue;
    b.buffer = take_buffer(unit.id);
    offload::reload(device_, b.offloaded, b.buffer->bytes());
  }
}

FirstError GradientWrites::abandon() noexcept {
  FirstError error;
  inbox_.end_pass();
  error.attempt([this] { drop(); });
  if (error.get() == nullptr) return error;
  // The streams could not be ordered, so the host waits. Where that fails, too, the device is lost:
  // nothing runs on it that could still read what goes.
  error.attempt([this] { stream().synchronize(); });
  compute_is_behind_ = false;
  held_.forget();
  for (UnitBuffer& b : buffers_of_) b.buffer.reset();
  return error;
}

}  // namespace strata::engine
