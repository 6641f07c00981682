// Seam: how the ranks of one job exchange bytes. Implementations: local_collectives (threads of one
// process), shm_collectives (processes of one host), peer_collectives (devices of one host),
// combined_collectives (grouped, split and joint ones, each made of two others) and, above the
// torch line, c10d_collectives (gloo) and device_collectives (NCCL for the bulk of device memory).
//
// Model. Each rank owns slices of things; a slice lives in a SharedBuffer, memory that peers may
// read. Two kinds of operation move bulk data:
//   all_gather      copies every rank's slice into my flat buffer. With Traits::one_sided I pull
//   the
//                   slices when I like, and peers need not take part. Else it is a collective:
//                   every rank calls it, in the same order.
//   reduce_scatter  adds up every rank's copy of my slice. Always a collective in one common order:
//                   the k-th call on each rank forms one operation, checked by its `tag`. Several
//                   may be started before the first is waited for. The work may be done in wait(),
//                   done() or any later call of this rank, so a rank that computes for long should
//                   call done() now and then.
//   exchange        carries a parcel from each rank to each, in the same order and manner as
//                   reductions.
// With Traits::has_inbox, ranks may write contributions into the memory of the ranks that add them
// up (inbox.h). reduce_scatter, Inbox::reduce, exchange, all_reduce, broadcast, all_gather_text and
// barrier share that one order.
// One-sided gathers are sound because slices change only between two sync points: after an
// all_reduce (or barrier) that every rank entered having finished its gathers, and before the next
// barrier. If other code than the engine can write slices, finish_gathers() follows the gathers.
//
// Shard groups. Things may be sharded inside groups of consecutive ranks and held alike by every
// group (grouped_collectives). Then slices and gathers are those of this rank's group, and a
// reduction still adds up the contributions of all ranks; a slice's replicas get the same bits.
// rank(), world_size(), roots, texts and errors are always those of the world.
//
// Device memory: an operation runs after the work that the device's compute stream held when the
// operation was started. wait() makes that stream wait, not the host; "complete" below means this.
// A reduction may use its source as scratch.
//
// Threads: one thread of a rank calls at a time; ranks are different threads or processes.
// Ownership: spans and buffers passed in must outlive the returned Work's wait().
// Errors: UsageError for arguments that cannot be right on this rank alone; nothing was started.
// From the call that starts an operation or from its wait(): CommError, on every surviving rank,
// within `timeout`. It names a rank that died, or each rank's operation if they do not match. After
// an error the object is broken: every later call throws the same error at once. Never a hang.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/base/units.h"
#include "strata/comm/inbox.h"
#include "strata/comm/parcels.h"
#include "strata/comm/traits.h"
#include "strata/device/device.h"

namespace strata {
class ThreadPool;
}

namespace strata::comm {

// The names of ranks in errors: their numbers in the world, of which these may be some.
struct RankNames {
  int first = 0;
  int step = 1;
  int of(int rank) const { return first + step * rank; }
};

struct CommOptions {
  // How long a rank waits for another that lives but does not come. Long, since one rank may write
  // a checkpoint while the others wait; a rank that ends is noticed at once, whatever the timeout.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  // Splits large copies and sums; not owned, may be null. Used by the rank's calling thread only.
  ThreadPool* pool = nullptr;
  RankNames names = {};
};

// Page-aligned zeroed memory of this rank that its peers can read. Freed by the destructor; every
// rank must have finished reading it by then (a barrier after the last use). A buffer may outlive
// its Collectives: its memory stays this rank's, and peers can no longer read it.
class SharedBuffer : public Interface {
 public:
  explicit SharedBuffer(std::string name) : name_(std::move(name)) {}
  virtual std::span<std::byte> local() = 0;
  const std::string& name() const { return name_; }
  // For buffers of allocate_growing(): from now on the first `bytes` may be used. Never shrinks.
  virtual void back(Bytes /*bytes*/) {}
  // For buffers of allocate_growing(): whether release() can give the memory back to the device
  // while the buffer lives.
  virtual bool releasable() const { return false; }
  // Gives the memory back. local() keeps its address, and no rank may touch it until back() was
  // called again; its content is undefined then. All ranks must have finished reading before (a
  // barrier), and may read again after every rank's back() (another barrier).
  virtual void release() {}

 private:
  std::string name_;
};

// Where each rank keeps the slice of one thing that it holds: rank r's (r counts held slices) is at
// first_offset + r * stride of r's own SharedBuffer with the name of `buffer`, and is slice_bytes
// long. A sharded thing has stride 0; a thing that every rank holds whole has stride slice_bytes.
// Without a buffer each rank has written its slice to its place in the target of the gather; only
// where gathers are not one-sided.
struct SliceMap {
  const SharedBuffer* buffer = nullptr;
  Bytes first_offset;
  Bytes stride;
  Bytes slice_bytes;
  // Without a buffer: the slice is complete after the work that this stream holds; null: the
  // compute stream.
  device::Stream* writer = nullptr;
};

// The contributions that a reduction adds up over several shard groups. Over one all are equal.
enum class Replicas {
  kSum,     // the contributions of all ranks
  kLater,   // those of this rank's group: the result is a part of what a later kSumAll makes whole
  kSumAll,  // those of all ranks, and the parts that their results hold: needs `accumulate`
};

// One rank's contribution to a reduce_scatter, and its result.
struct Reduction {
  const SharedBuffer* source = nullptr;  // this rank's whole contribution: a slice a rank
  Bytes source_offset;
  DType dtype = DType::kFloat32;  // of the source
  std::span<float> result;        // [slice_numel] fp32, this rank's slice
  float scale = 1.0F;             // result = scale * sum, or
  bool accumulate = false;        // result += scale * sum
  // The contribution is complete, and the result may be written, after the work that this stream
  // holds; null: the compute stream.
  device::Stream* writer = nullptr;
  Replicas replicas = Replicas::kSum;
};

// Parcels among the ranks of this rank's shard group, from memory of the senders.
struct Exchange {
  const SharedBuffer* source = nullptr;  // begins with this rank's parcels
  std::span<std::byte> target;           // exactly the parcels for this rank
  const Parcels* parcels = nullptr;      // outlives wait()
};

// Times of an operation by the device's clock. Bytes moved between ranks from `begin` to `end`. A
// reduction also has `ready`, when this rank's contribution was complete. Null: not known.
struct WorkTimes {
  std::shared_ptr<device::TimedEvent> ready;
  std::shared_ptr<device::TimedEvent> begin;
  std::shared_ptr<device::TimedEvent> end;
};

// A started operation. wait() returns when it is complete: results are readable and every buffer
// that was passed in may be changed again. wait() rethrows the operation's error; it may be called
// again. The destructor waits and drops errors.
class Work : public Interface {
 public:
  virtual bool done() = 0;
  virtual void wait() = 0;
  // Returns when the memory that the operation reads may be changed again; its result may come
  // later. With several shard groups, ranks wait() for reductions at the same points between their
  // other operations, since another reduction across groups begins there; they may call this at any
  // time.
  virtual void wait_for_readers() { wait(); }
  // wait() for destructors: drops errors, which wait() reports to those that ask.
  void wait_quietly() noexcept {
    FirstError dropped;
    dropped.attempt([this] { wait(); });
  }
  // Known for an operation that was started with record_times(true) and runs on its own streams.
  virtual WorkTimes times() const { return {}; }
};

class CompletedWork final : public Work {
 public:
  bool done() override { return true; }
  void wait() override {}
};

// The bytes that an operation moves, by the streams that carry them. Each stream keeps its order,
// and waits for another one only where the bytes are the same.
enum class Traffic { kGathers, kContributions, kReductions };

enum class ReduceOp { kSum, kMin, kMax };

// The reason why a rank takes part no more: it failed, or its program ends.
enum class Ending { kFailed, kLeft };

class Collectives : public Interface {
 public:
  virtual std::string_view name() const = 0;  // "local", "shm", "gloo", "nccl"
  int rank() const { return rank_; }
  const Traits& traits() const { return traits_; }
  int world_size() const { return traits_.world_size; }
  const ShardPosition& shard_position() const { return traits_.place; }

  // Local, not a collective; peers find the buffer by its name when they first read it. `name` is
  // unique among this rank's living buffers.
  virtual std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) = 0;
  // A buffer of which only a prefix has memory, at first none. Host memory is backed at its first
  // use, so an ordinary buffer serves there.
  virtual std::unique_ptr<SharedBuffer> allocate_growing(std::string name, Bytes bytes) {
    return allocate(std::move(name), bytes);
  }

  // flat = slice of rank 0, slice of rank 1, ...: held_count * slice_bytes. My own slice may
  // already lie at its place in `flat` (gather in place). `tag` names the thing in errors.
  virtual std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                           std::string_view tag) = 0;

  // A collective of this rank's shard group, after a round of gathers which each of its ranks
  // makes. The work's wait() returns when every rank has finished the gathers that it had started
  // before its call. From then on no rank reads slices of this rank, and a script may write them.
  // Null: every rank has finished them already.
  virtual std::unique_ptr<Work> finish_gathers() { return nullptr; }

  // Peers cannot free memory as long as this rank has it mapped. Unmaps all memory that peers have
  // freed or released, after a barrier that follows the freeing. Otherwise that happens some time
  // later. Local.
  virtual void unmap_freed() {}

  // If ShardPosition::parts is more than 1: copies the parts that other ranks own into these slices
  // of mine. They are complete when this returns, as works are; group_barrier() has yet to come.
  virtual void complete_slices(std::span<const SliceMap> /*slices*/) {}

  // Sums in fp32 in the order of ranks, so that the bits are the same in every run (gloo and NCCL
  // keep their own order: Traits::deterministic is false).
  virtual std::unique_ptr<Work> reduce_scatter(const Reduction& reduction,
                                               std::string_view tag) = 0;

  // A rank's parcel for itself is copied, too. If ranks pass different parcels, all get an error.
  virtual std::unique_ptr<Work> exchange(const Exchange& exchange, std::string_view tag) = 0;

  // The device's stream that carries this traffic; null: no stream of its own. Contributions are
  // best written in theirs (Reduction::writer). Each reduction writes its result in the stream of
  // reductions, and a reader of the result may be queued there.
  virtual device::Stream* stream(Traffic /*traffic*/) { return nullptr; }

  // Memory into which the other ranks write their contributions themselves. Null unless
  // Traits::has_inbox: ranks reach each other's memory, and things are sharded over all of them.
  // Local, as allocate() is.
  virtual std::unique_ptr<Inbox> make_inbox(std::string /*name*/, Bytes /*bytes*/) {
    return nullptr;
  }

  // Whether works that are started from now on know their times(). Not from the start.
  virtual void record_times(bool /*on*/) {}

  // Small values, in place, the same bits on every rank (summed in rank order).
  virtual void all_reduce(std::span<double> values, ReduceOp op) = 0;

  // Gathers every rank's `mine`, at most kOnDeviceMost bytes of device memory, in the order of
  // ranks, into `all`. Runs in the compute stream: no host waits for a device. Work that is queued
  // on the compute stream later runs after the work that was queued before on the compute streams
  // of all ranks, and after the gathers that it started. Only if Traits::gathers_on_device.
  virtual void all_gather_on_device(std::span<std::byte> /*all*/,
                                    std::span<const std::byte> /*mine*/) {
    throw UsageError("these collectives exchange nothing on devices: ask traits() first");
  }
  static constexpr std::size_t kOnDeviceMost = 64;

  virtual void broadcast(std::span<std::byte> bytes, int root) = 0;

  // Control plane: the text of every rank, by rank. Texts may differ in length.
  virtual std::vector<std::string> all_gather_text(const std::string& text) = 0;

  virtual void barrier() = 0;
  // A barrier of this rank's shard group alone: it suffices before changed slices are gathered.
  virtual void group_barrier() { barrier(); }

  // For a rank whose program ends, before the barrier in which it waits for the others. If another
  // rank comes for another operation, the errors say that this rank has left, with `words`. Local.
  virtual void announce_departure(std::string_view words) { departure_ = words; }
  const std::string& departure() const { return departure_; }  // empty: not announced
  // After that barrier all ranks are at their end: this rank sends the others nothing more, and
  // asks nothing of hosts that may be gone. Local.
  virtual void all_left() noexcept {}

  // Throws the error that has ended these collectives, as every later call does, and makes it known
  // to peers that do not know it yet. Notices an ended or failed peer as far as that needs no wait.
  // Local: no other rank takes part, and it takes no memory; may be called any number of times. If
  // it does not throw, the next call may fail all the same.
  virtual void require_usable() = 0;

  // Makes known that this rank takes part no more: peers' pending and later calls throw a CommError
  // that names this rank, its ending and `reason`. The first ending counts. Local, waits for no
  // peer, may be called from a destructor.
  virtual void end(Ending ending, std::string_view reason) noexcept = 0;
  void abort(std::string_view reason) noexcept { end(Ending::kFailed, reason); }
  // For a program that an exception ends: peers throw "rank 1 left: <reason>".
  void leave(std::string_view reason) noexcept { end(Ending::kLeft, reason); }

 protected:
  Collectives(int rank, const Traits& traits) : rank_(rank), traits_(traits) {}

 private:
  int rank_;
  Traits traits_;
  std::string departure_;
};

// How ranks find each other before any Collectives exist: a way to exchange short texts. Above the
// torch line a c10d Store implements it. Threads: one thread a rank. Errors: CommError that names
// the ranks that did not come within the timeout.
class Bootstrap : public Interface {
 public:
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // Collective: returns what every rank passed, by rank. The k-th call on each rank forms one
  // exchange.
  virtual std::vector<std::string> exchange(const std::string& text) = 0;
};

}  // namespace strata::comm
