// Seam: the place of optimizer states (master weights, exp_avg, exp_avg_sq) between steps, on any
// tier. The optimizer fetches a block, or parts of blocks, works on them through leases, and gives
// them back. Implementations: memory_store (device or host memory), nvme_store (a drive).
//
// Work. Kernels of the store's device reach a lease; the host reaches it if its memory is host
// memory. A caller may give a lease back while work on it is queued on the device's compute stream;
// the host's own work on it has ended by then. A later fetch of the part finds it as that work
// leaves it: the same stream does, and so does the host in a store on a drive.
// Room. A caller fetches all that it holds at once in one call. When no lease is held, a call
// always succeeds if its leases have at most lease_budget() bytes in all, each rounded up to
// kPartAlignment. When leases are held already, a call may fail, but never waits for ever.
// Offloading states. A script can free device memory for other uses: offload_states() moves blocks
// of one kind from the device to the host, and reload_states() brings them back. Blocks on other
// tiers stay there. Threads: one thread at a time. Ownership: a Lease borrows memory of the store
// until it is destroyed; leases that are held at the same time do not overlap. Errors:
// OutOfMemoryError from add_all(); earlier blocks stay unchanged. IoError from fetch() and flush():
// the store never lends a block again that it failed to read or write. The next of these calls
// throws an error of work beside the caller. UsageError.
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

// Borrowed memory of one part. The destructor gives it back; after kReadWrite the store keeps its
// content.
class Lease {
 public:
  virtual ~Lease() = default;
  virtual std::span<std::byte> bytes() = 0;  // aligned to 64 bytes at least
  // The work that this stream holds now uses the lease, instead of work on the compute stream. The
  // caller may give the lease back before that work ends. At most one call.
  virtual void used_in(device::Stream& /*stream*/) {}
};

class StateStore {
 public:
  virtual ~StateStore() = default;
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
  // Parked blocks stay parked. Throws OutOfMemoryError, and UsageError if one of the blocks is
  // leased: nothing has changed then.
  virtual void offload_states(memory::Kind /*kind*/, bool /*pinned*/) {}
  // Brings all parked blocks back, with the same bits; their leases may have other addresses than
  // before. Throws OutOfMemoryError: the rest stays parked, and a later call may bring it back.
  virtual void reload_states() {}
  virtual StoreCounts counts() const { return {}; }

  // --- drives; stores in memory have nothing to report ---
  // The store notifies `watch` of transfers; null ends that.
  virtual void watch(LinkWatch* /*watch*/) {}
  virtual std::vector<DriveWrites> wear() const { return {}; }
  // Measures the drives in some hundredths of a second, and waits for no transfer under way. Errors
  // as measure_drive() says.
  virtual DriveLimit measure_drives() { return {}; }
};

}  // namespace strata::offload
