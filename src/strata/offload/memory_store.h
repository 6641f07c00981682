// StateStore in memory: a lease is the block itself. Blocks that were added together lie in one
// buffer, each at a multiple of 64 bytes; the buffer is charged. One class for the device and the
// host tier, which differ only in who allocates.
// Threads: one at a time. Ownership: the store owns the buffers; a lease keeps its own alive.
// On a device, work on a lease is complete before the lease is given back.
// Errors: OutOfMemoryError from add_all(); UsageError for a block that does not exist or is leased
// already.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "strata/device/device.h"
#include "strata/offload/state_store.h"

namespace strata {
class ThreadPool;
}

namespace strata::offload {

struct HostStoreOptions {
  std::shared_ptr<memory::Ledger> ledger = nullptr;  // null: charged nowhere
  std::optional<Bytes> memory_limit =
      std::nullopt;  // the most that the store takes; nullopt: what there is
  ThreadPool* touch =
      nullptr;  // backs the pages of each block when it is added, with these threads
};

class MemoryStore final : public StateStore {
 public:
  // `device` outlives the store and its leases.
  static std::unique_ptr<MemoryStore> on_device(device::Device& device);
  static std::unique_ptr<MemoryStore> on_host(HostStoreOptions options);

  memory::Tier tier() const override { return tier_; }
  std::vector<BlockId> add_all(std::vector<BlockSpec> blocks) override;
  Bytes size_of(BlockId block) const override;
  std::unique_ptr<Lease> fetch(BlockId block, Access access) override;

 private:
  struct Block;
  class BlockLease;
  // Makes memory of zeroes, charged to the kind.
  using Allocate = std::function<std::unique_ptr<device::Memory>(Bytes, memory::Kind)>;

  MemoryStore(memory::Tier tier, Allocate allocate);
  const std::shared_ptr<Block>& block_of(BlockId block) const;

  const memory::Tier tier_;
  const Allocate allocate_;
  std::vector<std::shared_ptr<Block>> blocks_;  // by id
};

}  // namespace strata::offload
