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

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
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
                 Bytes max_held);

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
  void widen();
  void set_narrow() { wide_ = false; }
  bool wide() const { return wide_; }

  // The dtype in which a unit's gradients travel: it depends on passes alone, so all ranks agree.
  DType dtype(int unit) const { return dtype(unit, wide_); }
  Bytes bytes(int unit) const { return bytes_of(nth(units_, unit).layout.padded(), dtype(unit)); }
  Bytes largest() const;  // of the trainable units' bytes()

  bool has_buffer(int unit) const { return of(unit).buffer != nullptr; }
  void open_buffer(int unit);
  // One gradient of one parameter. push() sends it straight to the ranks that add it up; false: it
  // has to be written. write() adds it to the unit's buffer.
  bool push(int unit, int slot, const std::byte* gradient, DType dtype);
  void write(int unit, int slot, const std::byte* gradient, DType dtype);
  // Instead of write(), for a unit with a buffer: the compute stream may write to this place from
  // now on, until wrote().
  GradientTarget place(int unit, int slot);
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
  std::optional<std::size_t> write_missing(int unit);
  std::optional<std::size_t> push_missing(int unit);
  // Collective: starts the reduction of the written or pushed gradients into `reduction`.
  std::unique_ptr<comm::Work> reduce(int unit, comm::Reduction reduction, bool pushed);
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
  void compute_follows();  // the compute stream's later work waits for everything written
  // Forgets all written gradients, as drop() does after compute_follows(), despite any errors.
  FirstError abandon() noexcept;
  void drop();

  // Between passes, after a barrier: as GradientShards', for the buffers; frees the inbox, too.
  // Until reload_states() only drop() may be called.
  void offload_states(bool pinned);
  void reload_states();

 private:
  struct UnitBuffer {
    GradientBuffers::Lease buffer;
    std::vector<bool> written;                                    // slots of it that hold something
    std::unique_ptr<offload::OffloadedCopy> offloaded = nullptr;  // of the buffer
  };

  DType dtype(int unit, bool wide) const;
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
  GradientBuffers::Lease take_buffer(int unit);
  UnitBuffer& of(int unit) { return nth(buffers_of_, unit); }
  const UnitBuffer& of(int unit) const { return nth(buffers_of_, unit); }
  const plan::FlatLayout& layout(int unit) const { return nth(units_, unit).layout; }

  std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  device::Device& device_;
  GradientBuffers& buffers_;
  DType reduce_dtype_;
  GradientInbox inbox_;
  std::vector<UnitBuffer> buffers_of_;  // by unit; of frozen units unused
  bool wide_ = false;  // gradients of earlier passes are in the buffers, on some rank at least
  std::unique_ptr<device::Stream> own_stream_;  // null: the collectives have one, or none is needed
  device::Stream* stream_ = nullptr;            // null: the compute stream
  bool compute_is_behind_ = false;              // something was queued that it does not wait for
  Numel largest_tile_;
  HeldGradients held_;
};

}  // namespace strata::engine
