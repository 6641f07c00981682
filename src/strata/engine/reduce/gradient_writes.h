// Flat gradient buffers: memory that peers can read. A unit takes one when its first gradient
// arrives, and gives it back when its reduction has ended. Free buffers are kept by exact size
// (units repeat), so after the first passes nothing is allocated. The number in use at once depends
// on when reductions end; so as many are kept as the busiest of the last passes used, and the
// others are freed. The first pass does not count once there is another: its order is not known
// before, so it may need many more.
// Threads: one thread at a time. Ownership: a Buffer goes back to its pool, which must outlive it.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "strata/base/first_error.h"
#include "strata/comm/collectives.h"
#include "strata/comm/inbox.h"
#include "strata/device/device.h"
#include "strata/engine/unit/unit.h"
#include "strata/memory/ledger.h"
#include "strata/offload/host_memory.h"

namespace strata::engine {

class GradientBuffers {
 public:
  struct Allocation {
    std::unique_ptr<comm::SharedBuffer> memory;
    memory::Charge charge;
    // The end of this rank's part of the reduction that reads the memory, if that part runs on a
    // stream; null: there is nothing to wait for.
    std::unique_ptr<device::Event> read = nullptr;
  };
  using Buffer = std::unique_ptr<Allocation>;  // null: none

  GradientBuffers(std::string name, comm::Collectives& collectives,
                  std::shared_ptr<memory::Ledger> ledger)
      : name_(std::move(name)), collectives_(collectives), ledger_(std::move(ledger)) {}

  Buffer take(Bytes bytes);
  void give_back(Buffer buffer);
  void end_pass();
  // Frees all buffers that are not in use.
  void free_unused();
  int allocations() const { return allocations_; }

 private:
  std::string name_;
  comm::Collectives& collectives_;
  std::shared_ptr<memory::Ledger> ledger_;
  static constexpr std::size_t kPasses = 16;  // that decide how many are kept
  struct Size {
    std::vector<Buffer> free;
    std::size_t in_use = 0;
    std::size_t most_in_use = 0;                // since the last end_pass()
    std::array<std::size_t, kPasses> recent{};  // by pass: the most in use
  };
  std::map<std::size_t, Size> sizes_;  // by bytes
  int allocations_ = 0;
  std::size_t passes_ = 0;
};

// Gradients whose memory their writer keeps until a stream has read them. Other work may use that
// memory afterwards: the compute stream waits for the reading before a gradient is let go. Threads:
// one thread at a time. Ownership: shares the gradients' memory. Errors: DeviceError.
class HeldGradients {
 public:
  // `most`: bytes that are held at once; the newest gradient may exceed it.
  HeldGradients(device::Device& device, Bytes most) : device_(device), most_(most) {}

  // Until `reader` has done what it holds now. Without an owner the compute stream waits for that.
  void hold(std::shared_ptr<const void> owner, Bytes bytes, device::Stream& reader);
  // Lets go of all.
  void let_go() { let_go(Bytes()); }
  // The same where the host has waited for all streams.
  void forget();

 private:
  struct Held {
    std::shared_ptr<const void> owner;
    Bytes bytes;
    std::unique_ptr<device::Event> read;
  };
  void let_go(Bytes most);

  device::Device& device_;
  Bytes most_;
  std::deque<Held> held_;
  Bytes bytes_;
};

// Sends the gradients of one backward pass to the ranks that add them up, where collectives have an
// inbox. Each gradient goes there as soon as it has come, without a buffer of this rank. Some
// gradients cannot go at once: the sum of several, or one whose room in the inbox is still taken.
// They wait in the caller's buffer, and go when their unit is reduced.
//
// The first pass makes the inbox, with as many bytes as may be under way; they are charged as
// gradients. Threads: one thread at a time. Ownership: owns the inbox. Errors: CommError;
// OutOfMemoryError when the inbox is made.
class GradientInbox {
 public:
  // `most`: of contributions under way; one more may be written meanwhile.
  GradientInbox(std::string name, std::vector<Unit>& units, comm::Collectives& collectives,
                device::Device& device, Bytes most);

  // A pass that reduces these units, in this order; `dtypes` by unit, of contributions. The same on
  // every rank. Where there is no inbox nothing is active.
  void begin_pass(std::span<const int> order, std::span<const DType> dtypes);
  void end_pass() { active_ = false; }
  // Frees the inbox, on every rank, after a barrier; the next pass makes another.
  void free();
  bool active() const { return active_; }

  // Whether a gradient may go to its place now.
  bool takes(int unit) const;
  void write(int unit, int slot, const std::byte* gradient);
  bool has(int unit, int slot) const {
    return progress_[static_cast<std::size_t>(unit)].written[static_cast<std::size_t>(slot)];
  }
  void write_zero(int unit, int slot);
  // Collective. Every slot was written.
  std::unique_ptr<comm::Work> reduce(int unit, const comm::Reduction& reduction);

 private:
  struct Progress {
    std::size_t index = 0;  // among the contributions of this pass
    DType dtype = DType::kFloat32;
    std::vector<bool> written;  // by slot
  };
  bool make(std::span<const Bytes> contributions);
  bool zero_padding(const plan::FlatLayout& layout, std::span<float> shard);

  std::string name_;
  std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  device::Device& device_;
  Bytes most_;
  std::unique_ptr<comm::Inbox> inbox_;  // null: none yet, or none to be had
  Bytes bytes_;
  memory::Charge charge_;
  bool active_ = false;
  std::vector<Progress> progress_;  // by unit
};

// Writes gradients into the memory from which their reduction takes them: a flat buffer of their
// unit, or memory of the ranks that add them up.
//
// A parameter's gradient is written once, converted to the buffer's dtype, to its offset in its
// unit's flat buffer. That dtype is the reduce dtype. It is the unit's own dtype, with half the
// bytes, if that loses nothing: for gradients of 16 bits to which no later pass adds, and
// collectives that add them up in fp32. If ranks write into each other's memory (comm/inbox.h), a
// gradient goes straight to the ranks that add it up. The flat buffer is then for gradients that
// cannot: sums of several, those of passes that do not reduce, and those that come too late.
//
// On a device that runs ahead, gradients are written beside the model's kernels, on the stream of
// the collectives, or on one of this object's own; a few are held until that is done.
//
// The caller may write the gradient of a tile instead, to the address of place(), so that it exists
// once. It never goes into other ranks' memory, since they take it in slices, from a copy.
//
// Threads: one thread at a time. Ownership: gradients are read during push() and write(), or held
// by hold_until_written(). Errors: OutOfMemoryError for a buffer; CommError; DeviceError.

// The place to which a caller writes the gradient of a parameter.
struct GradientTarget {
  std::byte* values = nullptr;
  DType dtype = DType::kFloat32;
  bool holds = false;  // something that the gradient is added to; else whatever lay there
};

struct GradientWriteOptions {
  std::string name;  // of the engine
  DType reduce_dtype = DType::kFloat32;
  Bytes max_pushed;  // on their way to other ranks
  Bytes max_held;    // of gradients that wait to be written; the newest may exceed it
};

class GradientWrites {
 public:
  GradientWrites(std::vector<Unit>& units, comm::Collectives& collectives, device::Device& device,
                 GradientBuffers& buffers, GradientWriteOptions options);

  void add(int unit);  // no longer frozen; after a barrier, since the inbox goes
  // A pass that reduces units in this order, and may push gradients of them; the same on every
  // rank. Where ranks do not write into each other's memory nothing is pushed.
  void begin_pushing(std::span<const int> order);
  void end_pushing() { inbox_.end_pass(); }
  bool pushing() const { return inbox_.active(); }
  // Later passes add to the values in the buffers: from now on these have the reduce dtype, and
  // gradients that came too late are widened. set_narrow() ends that when all are reduced.
  void widen();
  void set_narrow() { wide_ = false; }
  bool wide() const { return wide_; }

  // The dtype in which a unit's gradients travel: it depends on passes alone, so all ranks agree.
  DType dtype(int unit) const { return dtype(unit, wide_); }
  Bytes bytes(int unit) const {
    return bytes_of(units_[static_cast<std::size_t>(unit)].layout.padded(), dtype(unit));
  }

  bool has_buffer(int unit) const { return of(unit).buffer != nullptr; }
  void open_buffer(int unit);
  // One gradient of one parameter. push() sends it straight to the ranks that add it up; false: it
  // has to be written. write() adds it to the unit's buffer.
  bool push(int unit, int slot, const std::byte* gradient, DType dtype);
  void write(int unit, int slot, const std::byte* gradient, DType dtype);
  // Instead of write(), for a unit with a buffer: the compute stream may write to this place from
  // now on, until wrote().
  GradientTarget place(int unit, int slot);
  void wrote(int unit, int slot);
  // Keeps `owner` of a gradient of `bytes` until the gradient is written. Null: the compute stream
  // waits until then.
  void hold_until_written(std::shared_ptr<const void> owner, Bytes bytes);

  // Make a unit ready to be reduced: zeroes where no gradient came. write_missing() in its buffer,
  // push_missing() at the ranks that add up, where what lies in the buffer goes as well. Return the
  // first slot that has elements, is trained and got no gradient.
  std::optional<std::size_t> write_missing(int unit);
  std::optional<std::size_t> push_missing(int unit);
  // Collective: starts the reduction of the written or pushed gradients into `reduction`.
  std::unique_ptr<comm::Work> reduce(int unit, comm::Reduction reduction, bool pushed);
  // The buffer, for as long as the reduction reads it. A pushed unit has none, unless gradients in
  // its buffer were pushed, too. A buffer with gradients that came too late stays.
  GradientBuffers::Buffer release_buffer(int unit, bool pushed);

  void drop(int unit, int slot) {  // forgets what was written of one parameter; between passes
    if (has_buffer(unit)) of(unit).written[static_cast<std::size_t>(slot)] = false;
  }
  void compute_follows();  // the compute stream's later work waits for everything written
  // Forgets all written gradients, as drop() does after compute_follows(), despite any errors.
  FirstError abandon() noexcept;
  void drop();

  // Between passes, after a barrier: moves the content of buffers to the host, and frees buffers
  // and inbox. Until reload_states() only drop() may be called. Both calls may throw
  // OutOfMemoryError, and be called again: offload_states() has done nothing then, reload_states()
  // a part.
  void offload_states(bool pinned);
  void reload_states();

 private:
  struct UnitBuffer {
    GradientBuffers::Buffer buffer;
    std::vector<bool> written;                                 // slots of it that hold something
    std::unique_ptr<offload::OffloadedCopy> offloaded = nullptr;  // of the buffer
  };

  DType dtype(int unit, bool wide) const;
  device::Stream& stream();
  void follow_compute();
  std::span<std::byte> place_of(int unit, const plan::Slot& slot);
  GradientBuffers::Buffer take_buffer(int unit);
  UnitBuffer& of(int unit) { return buffers_of_[static_cast<std::size_t>(unit)]; }
  const UnitBuffer& of(int unit) const { return buffers_of_[static_cast<std::size_t>(unit)]; }
  const plan::FlatLayout& layout(int unit) const {
    return units_[static_cast<std::size_t>(unit)].layout;
  }

  std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  device::Device& device_;
  GradientBuffers& buffers_;
  GradientWriteOptions options_;
  GradientInbox inbox_;
  std::vector<UnitBuffer> buffers_of_;  // by unit; of frozen units unused
  bool wide_ = false;  // gradients of earlier passes are in the buffers, on some rank at least
  std::unique_ptr<device::Stream> own_stream_;  // null: the collectives have one, or none is needed
  device::Stream* stream_ = nullptr;            // null: the compute stream
  bool compute_is_behind_ = false;  // something was queued that it was not told to wait for
  Numel largest_tile_;
  HeldGradients held_;
};

}  // namespace strata::engine
