// Seam: where optimizer state (master weights, exp_avg, exp_avg_sq) rests between steps, whatever
// its tier. The optimizer asks for a block, or for parts of some, works on them through leases and
// gives them back. Implementations: memory_store (device or host memory), nvme_store (a drive).
//
// Work. Kernels of the store's device reach a lease, and the host does where its memory is host
// memory. A lease may be given back while work on it is queued on the device's compute stream; what
// the host itself does with it is done by then. A part that is fetched again is as that work leaves
// it: for what goes to the same stream and, in a store on a drive, for the host.
// Room. Everything that is held at once is fetched in one call: leases of lease_budget() bytes in
// all, each rounded up to kPartAlignment, are always given where none is held. Where some are held
// already a call may fail, and never waits for ever.
// Parking. For a while memory of the device can be given to somebody else: park() moves blocks of a
// kind that rest there to the host, unpark() brings them back. What rests elsewhere stays.
// Threads: one thread at a time. Ownership: a Lease borrows memory of the store until it is
// destroyed; parts that are leased at the same time do not overlap.
// Errors: OutOfMemoryError from add_all(), and what was added stays as it was. IoError from
// fetch() and flush(): what could not be read or written is not lent any more. An error of
// something that goes on beside the caller is thrown by the next of these calls. UsageError.
#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strata/base/units.h"
#include "strata/device/device.h"
#include "strata/memory/ledger.h"
#include "strata/offload/drive_limit.h"
#include "strata/offload/link_watch.h"
#include "strata/offload/part.h"
#include "strata/offload/store_counts.h"

namespace strata::offload {

enum class Access { kRead, kReadWrite };

struct BlockSpec {
  std::string name;
  Bytes bytes;
  memory::Kind kind;
  std::optional<memory::Tier> tier = std::nullopt;  // in a store of several (tiered_store.h)
};

// Borrowed memory of one part. Giving it back (destroying it) after kReadWrite keeps what was
// written.
class Lease {
 public:
  virtual ~Lease() = default;
  virtual std::span<std::byte> bytes() = 0;  // aligned to 64 bytes at least
  // What this stream of the device holds now uses the lease, which may be given back meanwhile.
  // Instead of the compute stream, once.
  virtual void used_in(device::Stream& /*stream*/) {}
};

class StateStore {
 public:
  virtual ~StateStore() = default;
  virtual memory::Tier tier() const = 0;
  // Declares blocks of zeroes. Space is taken now, so that a store that is too small fails here,
  // and has none of them then. Blocks that come together cost one allocation a kind.
  virtual std::vector<BlockId> add_all(std::vector<BlockSpec> blocks) = 0;
  BlockId add(std::string name, Bytes bytes, memory::Kind kind) {
    return add_all({{std::move(name), bytes, kind, std::nullopt}}).front();
  }
  // Blocks that the last add_all() has returned, all of them, of which nothing was fetched: they
  // are gone as if they had never been added, and their space with them.
  virtual void take_back(std::span<const BlockId> added) noexcept = 0;
  virtual Bytes size_of(BlockId block) const = 0;

  // All of them or none, in their order.
  virtual std::vector<std::unique_ptr<Lease>> fetch_together(std::span<const Part> parts,
                                                             Access access) = 0;
  std::unique_ptr<Lease> fetch(const Part& part, Access access) {
    return std::move(fetch_together({&part, 1}, access).front());
  }
  std::unique_ptr<Lease> fetch(BlockId block, Access access) {
    return fetch({block, Bytes(), size_of(block)}, access);
  }
  // What leases of such a block that are fetched together, with others of its tier, should hold at
  // most. In a store on a drive it leaves room for what is read ahead and what is still being
  // written.
  virtual Bytes lease_budget(BlockId /*block*/) const {
    return Bytes(std::numeric_limits<std::int64_t>::max());
  }

  // Goes on with what happens beside the caller as far as that can be done without waiting: writes
  // what was given back, reads ahead. fetch() does it, too; who fetches nothing for a while, as
  // after the last unit of a step, calls it then and now and again.
  virtual void advance() {}
  // Returns when all that was given back lies where it rests.
  virtual void flush() {}

  // Memory of the device that holds blocks of this kind is free when this returns; their content is
  // on the host, in pinned memory where `pinned`. Until unpark() to fetch one of them is a
  // UsageError. Those that are parked stay so. Throws OutOfMemoryError, and UsageError where one is
  // leased: nothing has changed then.
  virtual void park(memory::Kind /*kind*/, bool /*pinned*/) {}
  // All that is parked has its place and its bits again; leases are of other memory than before.
  // Throws OutOfMemoryError: what has not come back stays parked, and may come later.
  virtual void unpark() {}
  virtual StoreCounts counts() const { return {}; }

  // --- drives; of stores in memory there is nothing to tell ---
  // Who is told of transfers; null: nobody.
  virtual void watch(LinkWatch* /*watch*/) {}
  virtual std::vector<DriveWear> wear() const { return {}; }
  // Measures them. Takes some hundredths of a second, and waits for nothing that goes on. Errors as
  // measure_drive() says.
  virtual DriveLimit measure_drives() { return {}; }
};

}  // namespace strata::offload
