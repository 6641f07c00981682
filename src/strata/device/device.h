// Seam: the place where weights live and kernels run. Implementations: cpu_device, cuda_device.
//
// Order. Work is queued on streams; a stream runs its work in order. An Event marks a point of a
// stream; another stream or the host can wait for it. The CPU device runs everything at once, in
// the caller's thread, so its streams are always idle; callers are written for the other case.
// Work that reads values which the model has computed, or writes values which the model will read,
// goes to compute_stream(). There it is in order with the model's own kernels without a wait.
// Memory. Host and device memory share one address space. copy() takes either; kernels take memory
// of the device, and memory of allocate_host() where that is pinned.
// Threads: a Device is internally synchronised; a Stream is used by one thread at a time.
// Ownership: Memory frees on destruction; work that uses it must be complete by then.
// Errors: OutOfMemoryError with the bytes wanted and the bytes that the ledger holds, by kind.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/file_descriptor.h"
#include "strata/base/interface.h"
#include "strata/base/units.h"
#include "strata/kernels/fingerprint.h"
#include "strata/kernels/grad_stats.h"
#include "strata/kernels/update.h"
#include "strata/kernels/vocabulary_loss.h"
#include "strata/memory/ledger.h"

namespace strata::device {

// How often the host waited for a device: calls that return only when work of it is over, whether
// or not it was over already, so that a program that does the same counts the same. Those are
// Event::wait(), Stream::synchronize(), and the freeing of memory where the driver waits for what
// runs. Not counted: a copy to memory that is not pinned, and what other libraries wait for.
// Devices of one place may share one. Threads: any. Errors: none.
class HostWaits {
 public:
  void note() { count_.fetch_add(1, std::memory_order_relaxed); }
  std::int64_t count() const { return count_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::int64_t> count_ = 0;
};

// Ranks of one host reach each other's memory through their devices by three means: pieces of
// memory that travel as file descriptors, mappings of such pieces in another process, and flags in
// host memory that streams write and wait for. Threads: a PeerMapping is used by one thread at a
// time; a Flag is atomic. Ownership: a mapping keeps the memory alive, even when its owner has
// freed it or has ended. Errors: DeviceError.

// A part of one rank's shared memory: `bytes` of the file, from `offset` on.
struct SharedHandle {
  FileDescriptor descriptor;
  Bytes offset;
  Bytes bytes;
};

// A peer's shared memory in this process, to read and to write: its pieces, one behind the other.
class PeerMapping : public Interface {
 public:
  virtual const std::byte* base() const = 0;
  virtual Bytes mapped() const = 0;
  virtual std::size_t pieces() const = 0;
  virtual void add(SharedHandle piece) = 0;
};

// Keeps host memory registered with the driver.
class HostRegistration : public Interface {};

// A count that only grows, but for its wrapping around.
using Flag = std::atomic<std::uint32_t>;
static_assert(sizeof(Flag) == sizeof(std::uint32_t) && Flag::is_always_lock_free);

inline bool reached(std::uint32_t flag, std::uint32_t value) {
  return static_cast<std::int32_t>(flag - value) >= 0;
}

// Memory of the device: aligned to at least 256 bytes, contents undefined. Charged to the ledger.
class Memory : public Interface {
 public:
  virtual std::span<std::byte> bytes() = 0;
};

// Pinned or ordinary host memory, aligned to pages.
class HostMemory : public Memory {
 public:
  virtual bool pinned() const = 0;
};

// An address range of which a prefix is backed by memory; grows without moving. New memory is zero.
class GrowableMemory : public Interface {
 public:
  virtual std::byte* base() = 0;
  virtual Bytes reserved() const = 0;
  virtual Bytes backed() const = 0;
  // Backs at least `bytes` (rounded up to the granule); never shrinks. Throws OutOfMemoryError.
  virtual void grow_to(Bytes bytes) = 0;
  // Gives all of it back to the system. The range stays, and may be backed again. No work may use
  // it any more.
  virtual void release() = 0;
  // For memory of Device::reserve_shared(): the number of pieces that back it so far, and one of
  // them for a peer to map.
  virtual std::size_t pieces() const = 0;
  virtual SharedHandle piece(std::size_t index) const = 0;
};

class Event : public Interface {
 public:
  virtual bool done() = 0;
  virtual void wait() = 0;  // blocks the calling thread
};

// An event that knows when it came, by the device's clock.
class TimedEvent : public Event {
 public:
  // Both are of one device, and done.
  virtual double seconds_since(TimedEvent& earlier) = 0;
};

class Stream : public Interface {
 public:
  virtual std::unique_ptr<Event> record() = 0;
  virtual std::unique_ptr<TimedEvent> record_timed() = 0;  // dearer: for measurements
  virtual void wait_for(Event& event) = 0;  // later work of this stream runs after the event
  virtual void synchronize() = 0;
};

class Device : public Interface {
 public:
  virtual std::string_view name() const = 0;  // "cpu", "cuda"
  virtual const std::shared_ptr<memory::Ledger>& ledger() const = 0;
  // Whether the host goes on while the device works, so that streams can overlap.
  virtual bool runs_ahead() const = 0;
  // Host waits on this device and on the devices that share the counter. A device that does not run
  // ahead counts none.
  virtual const std::shared_ptr<HostWaits>& host_waits() const = 0;

  virtual std::unique_ptr<Memory> allocate(Bytes bytes, memory::Kind kind) = 0;
  virtual std::unique_ptr<GrowableMemory> reserve(Bytes bytes, memory::Kind kind) = 0;
  // The same, of pieces that the ranks of this host can map. Throws DeviceError where the driver
  // cannot share memory.
  virtual std::unique_ptr<GrowableMemory> reserve_shared(Bytes bytes, memory::Kind kind) = 0;
  // Room for the pieces of a peer's shared memory of `bytes`, reached through this device.
  virtual std::unique_ptr<PeerMapping> reserve_mapping(Bytes bytes) = 0;
  // Device memory that the caller charges: buffers of collectives.
  virtual std::unique_ptr<Memory> allocate_uncharged(Bytes bytes) = 0;
  // Host memory of zeroes for transfers, charged to the host tier: pinned, so that they run at the
  // link's speed and beside the host, unless the system refuses to lock more (pinned() is false
  // then).
  virtual std::unique_ptr<HostMemory> allocate_host(Bytes bytes, memory::Kind kind) = 0;
  // Starts to make host memory in the background, if that is slow: the driver takes long to pin
  // pages. The next allocate_host() of exactly these bytes returns it. It is charged to the ledger
  // from now on; the device frees it at its end if no call has asked for it. Only one request is
  // kept: a second one drops the first. If it fails, allocate_host() tries again and reports.
  virtual void expect_host(Bytes bytes, memory::Kind kind) = 0;
  // Bytes that a new allocation may take, by the system's own count.
  virtual Bytes free_bytes() const = 0;
  // Whether the host may read and write the memory behind `pointer`. Always, on the CPU device.
  virtual bool host_accessible(const std::byte* pointer) const = 0;
  // Whether kernels may: memory of the device, and pinned host memory.
  virtual bool device_accessible(const std::byte* pointer) const = 0;
  // Makes existing host memory, whole pages, one that streams reach, for as long as the result
  // lives. Throws DeviceError where the system refuses.
  virtual std::unique_ptr<HostRegistration> pin(std::span<std::byte> host) = 0;

  // The stream has the model's priority. A waiting stream of higher priority would slow down every
  // kernel launch.
  virtual std::unique_ptr<Stream> create_stream() = 0;
  // The stream on which the model computes in the calling thread now; the object is the device's.
  virtual Stream& compute_stream() = 0;

  // Kernels and copies. Spans of one call do not overlap.
  virtual void copy(std::span<std::byte> target, std::span<const std::byte> source,
                    Stream& stream) = 0;
  virtual void fill_zero(std::span<std::byte> target, Stream& stream) = 0;
  // target = source, converted; both hold `numel` elements. Floating types only.
  virtual void cast(std::byte* target, DType target_dtype, const std::byte* source,
                    DType source_dtype, Numel numel, Stream& stream) = 0;
  // target += source, in fp32, rounded once to the target's type.
  virtual void accumulate(std::byte* target, DType target_dtype, const std::byte* source,
                          DType source_dtype, Numel numel, Stream& stream) = 0;
  // target = scale * (s_0 + s_1 + ...), or target += that, in fp32 in the order of `sources`, each
  // of target.size() elements of `dtype`; at most kSourcesMax. A single one may be the target.
  virtual void sum_in_order(std::span<float> target, std::span<const std::byte* const> sources,
                            DType dtype, float scale, bool accumulate, Stream& stream) = 0;
  // kernels::store_remainder().
  virtual void store_remainder(const kernels::MasterRemainder& target, Numel first,
                               const std::byte* source, DType source_dtype, Numel numel,
                               Stream& stream) = 0;
  // masters[i], which may be pinned memory of the host, from element first + i of bf16 weights and
  // their remainders: kernels::joined_master().
  virtual void join_masters(std::span<float> masters, const std::byte* weights,
                            const kernels::MasterRemainder& remainder, Numel first,
                            Stream& stream) = 0;
  // kernels::adopt_written().
  virtual void adopt_written(std::span<float> masters, const std::byte* weights, DType dtype,
                             Stream& stream) = 0;
  virtual void update_step(const kernels::UpdateSpans& spans, const kernels::UpdateScalars& scalars,
                           Stream& stream) = 0;
  // Updates memory of the host in the calling thread and those of `pool`, at once: any thread may
  // call it beside all others. The values are those of update_step(); late_scale is null.
  virtual void update_on_host(const kernels::UpdateSpans& spans,
                              const kernels::UpdateScalars& scalars, ThreadPool& pool) {
    kernels::update_step(spans, scalars, &pool);
  }
  // Returns one fingerprint for each `piece` bytes of each run, in order; a run's last piece may be
  // shorter. Complete when it returns.
  virtual std::vector<kernels::Fingerprint> fingerprints(
      std::span<const std::span<const std::byte>> runs, Bytes piece, Stream& stream) = 0;
  // sums[i], in memory of the device: the sum of squares of gradients[i]; not finite where one of
  // them is not.
  virtual void sums_of_squares(std::span<double> sums,
                               std::span<const std::span<const float>> gradients,
                               Stream& stream) = 0;
  // kernels::gradient_factor(); all in memory of the device.
  virtual void gradient_factor(kernels::GradientFactor& result, std::span<const double> sums,
                               double loss_scale, double clipping, Stream& stream) = 0;

  // kernels::vocabulary_losses(); all in memory of the device.
  virtual void vocabulary_losses(const kernels::VocabularyRows& rows, Stream& stream) = 0;

  // Signals between ranks, in pinned host memory that all of them map: no processor of the device
  // waits. `*flag = value`, seen after everything that the stream did before.
  virtual void write_flag(Flag& flag, std::uint32_t value, Stream& stream) = 0;
  // Later work of the stream runs when *flag has reached `value`: counted from it, it is less than
  // 2^31 ahead. The CPU device waits in the call.
  virtual void wait_flag(const Flag& flag, std::uint32_t value, Stream& stream) = 0;

  static constexpr std::size_t kSourcesMax = 64;
};

}  // namespace strata::device
