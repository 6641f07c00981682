// Seam: the place of optimizer states (master weights, exp_avg, exp_avg_sq) between steps, on any
// tier. The optimizer fetches parts of blocks, works on them through leases, and gives them back.
// Implementations: memory_store (device or host memory), nvme_store (a drive).
//
// Work. Kernels of the store's device reach a lease; the host reaches it if its memory is host
// memory. A caller may give a lease back while work on it is queued on the device's compute stream;
// the host's own work on it has ended by then. A later fetch finds the part as that work leaves it.
// Room. A caller fetches all that it holds at once in one call. When no lease is held, a call
// always succeeds if its leases have at most lease_budget() bytes in all, each rounded up to
// kPartAlignment. When leases are held already, a call may fail, but never waits for ever.
// Threads: one at a time. Ownership: a Lease borrows memory of the store until it is destroyed;
// leases held at the same time do not overlap. Errors: OutOfMemoryError from add_all(); earlier
// blocks stay unchanged. IoError from fetch() and flush(): the store never lends a block again that
// it failed to read or write. The next of these calls throws an error of work beside the caller.
// UsageError.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "strata/base/interface.h"
#include "strata/base/units.h"
#include "strata/device/device.h"
#include "strata/io/io_engine.h"
#include "strata/memory/ledger.h"

namespace strata::offload {

using BlockId = std::int32_t;

// The unit of a drive's reads and writes: a part begins at a multiple of it, and ends at a multiple
// or at the end of its block.
inline constexpr Bytes kPartAlignment = 4_KiB;

// Bytes [begin, end) of a block: the bytes of one lease. Where blocks are larger than their staging
// memory, a caller works on one part after the other. A caller that works on several blocks takes
// the parts that hold the same elements.
struct Part {
  BlockId block = -1;
  Bytes begin;
  Bytes end;

  constexpr Bytes bytes() const { return end - begin; }
  // Whether both have a byte in common.
  constexpr bool overlaps(const Part& other) const {
    return block == other.block && std::max(begin, other.begin) < std::min(end, other.end);
  }
  constexpr bool operator==(const Part&) const = default;
  constexpr bool operator<(const Part& other) const {
    return std::tie(block, begin, end) < std::tie(other.block, other.begin, other.end);
  }
};

// Throws unless `part` lies in the block of this name and size.
void require_part(const Part& part, std::string_view name, Bytes size);
// Throws if two of them overlap.
void require_apart(std::span<const Part> parts);

// Throws the error of a fetch that overlaps `leased`, a part of the block of this name.
[[noreturn]] void throw_leased(const Part& leased, std::string_view name);

// How many elements to work on at once, where several blocks hold something of each element.
// `bits`: what an element takes in each block (32 for fp32, 1 for a flag), powers of two. The
// result is as large as `budget` (StateStore::lease_budget()) allows. A part that begins at a
// multiple of it begins at a multiple of kPartAlignment in every block. So it is at least the
// number of elements in one page of the block with the fewest bits, even if the budget is smaller.
Numel elements_at_once(std::span<const int> bits, Bytes budget);

// Receives a notification of each transfer over a rank's links: copies between the host and a
// separate device, and transfers of drives. The code that queues a copy or begins a transfer
// notifies this class, at one place for each kind. This base class ignores all notifications.
// Ownership: outlives its callers. Errors: those of the calls that it is given.

enum class Link : std::uint8_t {
  kUp,    // from the host to the device
  kDown,  // from the device to the host
  kRead,  // from drives
  kWrite,
};
inline constexpr int kLinkCount = 4;

class LinkWatch : public Interface {
 public:
  using Call = std::function<void()>;

  // Calls `queue`, which queues work in `stream` that moves `bytes` up or down: a copy, or a kernel
  // that works on the host's memory.
  virtual void copy(Link /*link*/, Bytes /*bytes*/, device::Stream& /*stream*/, const Call& queue) {
    queue();
  }
  // Calls `wait`, which makes the compute stream wait for such copies.
  virtual void await_copies(const Call& wait) { wait(); }
  // A drive has completed a transfer.
  virtual void record_transfer(Link /*link*/, Bytes /*bytes*/, const io::TransferTimes& /*times*/) {
  }
};

// The bytes and transfers of a StateStore, for reports. They count from the store's start, so the
// difference of two gives a step's or a run's share. `written` is the total of bytes written to the
// drive. A value; safe everywhere.
struct StoreCounts {
  std::int64_t parts = 0;        // lent
  std::int64_t parts_ready = 0;  // of them: those that were in memory when they were asked for
  std::int64_t reads = 0;        // transfers from the drive, also of what was read ahead in vain
  std::int64_t writes = 0;       // transfers to it
  Bytes read;                    // whole pages
  Bytes written;                 // whole pages
  double seconds_waited = 0.0;   // in fetch(): for reads, and for room in memory

  // Adds `other` to each count, `sign` times.
  StoreCounts& add(const StoreCounts& other, int sign = 1) {
    parts += other.parts * sign;
    parts_ready += other.parts_ready * sign;
    reads += other.reads * sign;
    writes += other.writes * sign;
    read += other.read * sign;
    written += other.written * sign;
    seconds_waited += other.seconds_waited * sign;
    return *this;
  }
  StoreCounts operator-(const StoreCounts& before) const {
    return StoreCounts(*this).add(before, -1);
  }
};

// All bytes written to a folder since the start, by any caller.
struct DriveWrites {
  std::string folder;
  Bytes written;
};

// The best speed of a store's drives that a short measurement found (block_file.h).
struct DriveLimit {
  double read_gb_per_s = 0.0;  // 0: not measured
  double write_gb_per_s = 0.0;
};

enum class Access { kRead, kReadWrite };

struct BlockSpec {
  std::string name;
  Bytes bytes;
  memory::Kind kind;
  std::optional<memory::Tier> tier = std::nullopt;  // in a store of several (TieredStore)
};

// Borrowed memory of one part. The destructor gives it back; after kReadWrite the store keeps its
// content.
class Lease : public Interface {
 public:
  virtual std::span<std::byte> bytes() = 0;  // aligned to 64 bytes at least
  // The work that this stream holds now uses the lease, instead of work on the compute stream. The
  // caller may give the lease back before that work ends. At most one call.
  virtual void used_in(device::Stream& /*stream*/) {}
};

class StateStore : public Interface {
 public:
  virtual memory::Tier tier() const = 0;
  // Declares blocks of zeroes. Takes their space now: a store that is too small fails here, and
  // adds none of them. The blocks of one call cost one allocation for each kind.
  virtual std::vector<BlockId> add_all(std::vector<BlockSpec> blocks) = 0;
  BlockId add(std::string name, Bytes bytes, memory::Kind kind) {
    return add_all({{std::move(name), bytes, kind, std::nullopt}}).front();
  }
  // `added`: all blocks of the last add_all(), none of which was fetched. Removes them and frees
  // their space, as if they had never been added.
  virtual void take_back(std::span<const BlockId> added) noexcept = 0;
  virtual Bytes size_of(BlockId block) const = 0;

  // Leases all parts or none, in their order.
  virtual std::vector<std::unique_ptr<Lease>> fetch_all(std::span<const Part> parts,
                                                        Access access) = 0;
  std::unique_ptr<Lease> fetch(const Part& part, Access access) {
    return std::move(fetch_all({&part, 1}, access).front());
  }
  std::unique_ptr<Lease> fetch(BlockId block, Access access) {
    return fetch({block, Bytes(), size_of(block)}, access);
  }
  // Copy an array of the host to a whole block and back, part by part. UsageError for an array of
  // another size than its block.
  void put(BlockId block, std::span<const std::byte> values);
  void bring(BlockId block, std::span<std::byte> values);
  // The most bytes that leases which are fetched together should hold, of this block and of others
  // in its tier. In a store on a drive this leaves room for prefetched parts and for parts that are
  // still being written.
  virtual Bytes lease_budget(BlockId /*block*/) const {
    return Bytes(std::numeric_limits<std::int64_t>::max());
  }

  // Continues the work beside the caller without waiting: writes returned parts, and prefetches.
  // fetch() does so, too. A caller that fetches nothing for a while, as after the last unit of a
  // step, calls it now and again.
  virtual void advance() {}
  // Returns when all returned parts have reached their tier.
  virtual void flush() {}

  // Frees the device memory of blocks of this kind before it returns; their content is on the host,
  // in pinned memory if `pinned`. Until reload_states(), a fetch of such a block is a UsageError.
  // Offloaded blocks stay offloaded. Throws OutOfMemoryError, and UsageError if one of the blocks
  // is leased: nothing has changed then.
  virtual void offload_states(memory::Kind /*kind*/, bool /*pinned*/) {}
  // Brings all offloaded blocks back, with the same bits; their leases may have other addresses
  // than before. Throws OutOfMemoryError: the rest stays offloaded, and a later call may bring it
  // back.
  virtual void reload_states() {}
  // --- host memory that a device's kernels reach over a link; other stores cache nothing ---
  // Caches whole blocks in free memory of the device: leases from now on lie there, and the copies
  // of the host are old until drop_cached(). Copies in `stream`, which stays until then. False, and
  // none of them: the device has no room, or one is leased.
  virtual bool cache(std::span<const BlockId> /*blocks*/, device::Stream& /*stream*/) {
    return false;
  }
  virtual bool cached(BlockId /*block*/) const { return false; }
  // Brings cached blocks back, but for leased ones, and frees the device's memory before it
  // returns. Any thread.
  virtual void drop_cached() {}
  virtual StoreCounts counts() const { return {}; }

  // --- drives; stores in memory have nothing to report ---
  // The store notifies `watch` of transfers; null ends that.
  virtual void watch(LinkWatch* /*watch*/) {}
  virtual std::vector<DriveWrites> drive_writes() const { return {}; }
  // Measures the drives in some hundredths of a second, and waits for no transfer under way. Errors
  // as measure_drive() says.
  virtual DriveLimit measure_drives() { return {}; }
};

}  // namespace strata::offload
