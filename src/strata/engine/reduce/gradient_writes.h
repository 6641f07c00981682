// Writes each gradient once into the memory from which its reduction takes it, converted to the
// dtype of that memory: the reduce dtype or, with half the bytes, the unit's own dtype if that
// loses nothing (for gradients of 16 bits to which no later pass adds, and collectives that add
// them up in fp32). If ranks write into each other's memory (comm/inbox.h), a gradient goes
// straight to the ranks that add it up. A flat buffer of its unit is for gradients that cannot:
// sums of several, those of passes that do not reduce, and those that come too late.
//
// On a device that runs ahead, gradients are written beside the model's kernels, on the stream of
// the collectives, or on one of this object's own; a few are held until that is done.
//
// The caller writes the gradient of a tile, to the address of place(), so that it exists once.
// Other ranks take it in slices, from a copy.
//
// Threads: one thread at a time. Ownership: gradients are read during push() and write(), or held
// by hold_until_written(). Errors: OutOfMemoryError for a buffer; CommError; DeviceError.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/reduce/gradient_buffers.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/engine/unit/unit.h"
#include "strata/offload/host_memory.h"

namespace strata::engine {

// The place to which a caller writes the gradient of a parameter.
struct GradientTarget {
  std::byte* values = nullptr;
  DType dtype = DType::kFloat32;
  bool holds = false;  // something that the gradient is added to; else whatever lay there
};

class GradientWrites {
 public:
  // `max_pushed`: bytes on their way to other ranks. `max_held`: bytes of gradients that wait to be
  // written; the newest may exceed it.
  GradientWrites(std::vector<Unit>& units, comm::Collectives& collectives, device::Device& device,
                 GradientBuffers& buffers, const EngineOptions& options, Bytes max_pushed,
                 Bytes max_held)
      : units_(units),
        collectives_(collectives),
        device_(device),
        buffers_(buffers),
        reduce_dtype_(options.reduce_dtype),
        inbox_(options.name, units, collectives, device, max_pushed),
        buffers_of_(units.size()),
        stream_(device.runs_ahead() ? collectives.stream(comm::Traffic::kContributions) : nullptr),
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

  void add(int unit) {  // no longer frozen; after a barrier, since the inbox goes
    compute_follows();
    of(unit).written.assign(layout(unit).slots().size(), false);
    inbox_.free();
  }
  // A pass that reduces units in this order, and may push gradients of them; the same on every
  // rank. Where ranks do not write into each other's memory nothing is pushed.
  void begin_pushing(std::span<const int> order) {
    std::vector<DType> dtypes(units_.size());
    for (const int unit : order) nth(dtypes, unit) = dtype(unit);
    inbox_.begin_pass(order, dtypes);
  }
  void end_pushing() { inbox_.end_pass(); }
  bool pushing() const { return inbox_.active(); }
  // Later passes add to the values in the buffers: from now on these have the reduce dtype, and
  // gradients that came too late are widened. set_narrow() ends that when all are reduced.
  void widen() {
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
  void set_narrow() { wide_ = false; }
  bool wide() const { return wide_; }

  // The dtype in which a unit's gradients travel: it depends on passes alone, so all ranks agree.
  DType dtype(int unit) const { return dtype(unit, wide_); }
  Bytes bytes(int unit) const { return bytes_of(nth(units_, unit).layout.padded(), dtype(unit)); }
  // The most of the trainable units' bytes().
  Bytes largest() const {
    Bytes largest;
    for (const Unit& unit : units_) {
      if (unit.trainable()) largest = std::max(largest, bytes(unit.id));
    }
    return largest;
  }

  bool has_buffer(int unit) const { return of(unit).buffer != nullptr; }
  void open_buffer(int unit) {
    UnitBuffer& b = of(unit);
    const DType type = dtype(unit);
    b.buffer = take_buffer(unit);
    follow_compute();
    std::fill(b.written.begin(), b.written.end(), false);
    // Padding is never written by a gradient; it must be zero, since it takes part in the
    // reduction.
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
  // One gradient of one parameter. push() sends it straight to the ranks that add it up, and holds
  // its owner until then; false: it has to be written. Small ones leave together, at the latest
  // when their unit is reduced. write() adds it to the unit's buffer.
  bool push(int unit, int slot, const std::byte* gradient, DType dtype_here,
            std::shared_ptr<const void>& owner) {
    if (!inbox_.takes(unit) || dtype_here != dtype(unit)) return false;
    const bool now = owner == nullptr;
    leaving_.push_back({unit, slot, gradient, std::move(owner)});
    leaving_bytes_ += bytes_of(nth(layout(unit).slots(), slot).numel, dtype_here);
    if (now || leaving_bytes_ >= kLeaveTogether) push_leaving();
    return true;
  }
  void write(int unit, int slot_index, const std::byte* gradient, DType dtype_here) {
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
  // Instead of write(), for a unit with a buffer: the compute stream may write to this place from
  // now on, until wrote().
  GradientTarget place(int unit, int slot) {
    UnitBuffer& b = of(unit);
    const auto index = static_cast<std::size_t>(slot);
    device::Stream& compute = device_.compute_stream();
    if (b.written[index] && stream_ != nullptr) compute.wait_for(*stream_->record());
    return {place_of(unit, layout(unit).slots()[index]).data(), dtype(unit), b.written[index]};
  }
  void wrote(int unit, int slot) {
    nth(of(unit).written, slot) = true;
    follow_compute();
    compute_is_behind_ = true;
  }
  // Keeps `owner` of a gradient of `bytes` until the gradient is written. Null: the compute stream
  // waits until then.
  void hold_until_written(std::shared_ptr<const void> owner, Bytes bytes) {
    if (stream_ != nullptr) held_.hold(std::move(owner), bytes, *stream_);
  }

  // Make a unit ready to be reduced, with zeroes where no gradient came: write_missing() in its
  // buffer, push_missing() at the ranks that add up, where the buffer's gradients go as well.
  // Return the first slot that has elements, is trained and got no gradient.
  std::optional<std::size_t> write_missing(int unit) {
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
  std::optional<std::size_t> push_missing(int unit) {
    UnitBuffer& b = of(unit);
    const std::span<const plan::Slot> slots = layout(unit).slots();
    std::optional<std::size_t> first;
    push_leaving();
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
  // Collective: starts the reduction of the written or pushed gradients into `reduction`.
  std::unique_ptr<comm::Work> reduce(int unit, comm::Reduction reduction, bool pushed) {
    reduction.dtype = dtype(unit);
    reduction.writer = stream_;
    if (pushed) return inbox_.reduce(unit, reduction);
    reduction.source = of(unit).buffer->memory.get();
    return collectives_.reduce_scatter(reduction, nth(units_, unit).name());
  }
  // The buffer, for as long as the reduction reads it. A pushed unit has none, unless gradients in
  // its buffer were pushed, too. A buffer with gradients that came too late stays.
  GradientBuffers::Lease release_buffer(int unit, bool pushed) {
    UnitBuffer& b = of(unit);
    const bool holds_late_ones = pushed && std::ranges::find(b.written, true) != b.written.end();
    return holds_late_ones ? nullptr : std::move(b.buffer);
  }

  void drop(int unit, int slot) {  // forgets what was written of one parameter; between passes
    if (has_buffer(unit)) nth(of(unit).written, slot) = false;
  }
  // The compute stream's later work waits for everything written.
  void compute_follows() {
    held_.let_go();
    // Skip the wait if we queued nothing: the stream is the collectives', which may be busy.
    if (std::exchange(compute_is_behind_, false) && stream_ != nullptr)
      device_.compute_stream().wait_for(*stream_->record());
  }
  // Forgets all written gradients, as drop() does after compute_follows(), despite any errors.
  FirstError abandon() noexcept {
    FirstError error;
    inbox_.end_pass();
    error.attempt([this] { drop(); });
    if (error.get() == nullptr) return error;
    // The streams could not be ordered, so the host waits. Where that fails, too, the device is
    // lost: nothing runs on it that could still read what goes.
    error.attempt([this] { stream().synchronize(); });
    compute_is_behind_ = false;
    forget_leaving();
    held_.forget();
    for (UnitBuffer& b : buffers_of_) b.buffer.reset();
    return error;
  }
  void drop() {
    forget_leaving();
    compute_follows();
    for (UnitBuffer& b : buffers_of_) {
      b.buffer.reset();
      b.offloaded.reset();
    }
  }

  // Between passes, after a barrier: as GradientShards', for the buffers; frees the inbox, too.
  // Until reload_states() only drop() may be called.
  void offload_states(bool pinned) {
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
  void reload_states() {
    for (const Unit& unit : units_) {
      UnitBuffer& b = of(unit.id);
      if (b.offloaded == nullptr) continue;
      b.buffer = take_buffer(unit.id);
      offload::reload(device_, b.offloaded, b.buffer->bytes());
    }
  }

 private:
  struct UnitBuffer {
    GradientBuffers::Lease buffer;
    std::vector<bool> written;                                    // slots of it that hold something
    std::unique_ptr<offload::OffloadedCopy> offloaded = nullptr;  // of the buffer
  };

  // A pushed gradient that is still here.
  struct Leaving {
    int unit = 0;
    int slot = 0;
    const std::byte* gradient = nullptr;
    std::shared_ptr<const void> owner;
  };
  static constexpr Bytes kLeaveTogether = 16_MiB;

  void forget_leaving() {
    leaving_.clear();
    leaving_bytes_ = Bytes();
  }
  void push_leaving() {
    if (leaving_.empty()) return;
    follow_compute();
    compute_is_behind_ = true;
    auto gradients = std::make_shared<std::vector<Leaving>>(std::exchange(leaving_, {}));
    const Bytes bytes = std::exchange(leaving_bytes_, Bytes());
    for (const Leaving& each : *gradients) inbox_.write(each.unit, each.slot, each.gradient);
    const bool owned = gradients->back().owner != nullptr;
    hold_until_written(owned ? std::move(gradients) : nullptr, bytes);
  }

  DType dtype(int unit, bool wide) const {
    const DType own = layout(unit).dtype();
    const bool exact = !wide && collectives_.traits().sums_in_fp32 && is_floating(own) &&
                       size_of(own) < size_of(reduce_dtype_);
    return exact ? own : reduce_dtype_;
  }
  device::Stream& stream() {
    compute_is_behind_ = true;
    return stream_ != nullptr ? *stream_ : device_.compute_stream();
  }
  void follow_compute() {  // later writes come after what the compute stream holds now
    if (stream_ != nullptr) stream_->wait_for(*device_.compute_stream().record());
  }
  std::span<std::byte> place_of(int unit, const plan::Slot& slot) {
    const DType type = dtype(unit);
    return of(unit).buffer->bytes().subspan(bytes_of(slot.offset, type).size(),
                                            bytes_of(slot.numel, type).size());
  }
  // Tiles share buffers, whatever the length of each: there is a free one wherever there was one.
  GradientBuffers::Lease take_buffer(int unit) {
    const bool tile = nth(units_, unit).spec.tile();
    return buffers_.acquire(tile ? bytes_of(largest_tile_, dtype(unit)) : bytes(unit));
  }
  UnitBuffer& of(int unit) { return nth(buffers_of_, unit); }
  const UnitBuffer& of(int unit) const { return nth(buffers_of_, unit); }
  const plan::FlatLayout& layout(int unit) const { return nth(units_, unit).layout; }

  std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  device::Device& device_;
  GradientBuffers& buffers_;
  DType reduce_dtype_;
  GradientInbox inbox_;
  std::vector<Leaving> leaving_;
  Bytes leaving_bytes_;
  std::vector<UnitBuffer> buffers_of_;  // by unit; of frozen units unused
  bool wide_ = false;  // gradients of earlier passes are in the buffers, on some rank at least
  std::unique_ptr<device::Stream> own_stream_;  // null: the collectives have one, or none is needed
  device::Stream* stream_ = nullptr;            // null: the compute stream
  bool compute_is_behind_ = false;              // something was queued that it does not wait for
  Numel largest_tile_;
  HeldGradients held_;
};

}  // namespace strata::engine
