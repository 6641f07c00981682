// StateStore in memory: a lease is the part of the block itself. Blocks that one add_all() added
// lie in one buffer, each at a multiple of 64 bytes; the buffer is charged. One class serves the
// device and the host tier; only the allocation differs. A device's host memory is pinned, so that
// its kernels read and write a lease in place, over the link, in the order of their stream.
// Threads: one at a time. Ownership: the store owns the buffers; a lease keeps its own alive.
// Errors: OutOfMemoryError from add_all(), also if the system does not let host memory be pinned;
// UsageError for a part that does not exist, is leased already or is offloaded.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "strata/device/device.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

class MemoryStore final : public StateStore {
 public:
  // `device` outlives the store and its leases. Its kernels work on leases, and its ledger is
  // charged.
  static std::unique_ptr<MemoryStore> on_device(device::Device& device);
  static std::unique_ptr<MemoryStore> on_host(device::Device& device);

  memory::Tier tier() const override { return tier_; }
  std::vector<BlockId> add_all(std::vector<BlockSpec> blocks) override;
  void take_back(std::span<const BlockId> added) noexcept override;
  Bytes size_of(BlockId block) const override;
  std::vector<std::unique_ptr<Lease>> fetch_all(std::span<const Part> parts,
                                                Access access) override;
  void offload_states(memory::Kind kind, bool pinned) override;
  void reload_states() override;
  StoreCounts counts() const override { return counts_; }

 private:
  struct Buffer;
  struct Block;
  class PartLease;
  // Makes zeroed memory, charged to the kind.
  using Allocate = std::function<std::unique_ptr<device::Memory>(Bytes, memory::Kind)>;

  // `device`: the device whose memory can be offloaded; null: nothing can be offloaded.
  MemoryStore(memory::Tier tier, Allocate allocate, device::Device* device);
  void require_fetchable(const Block& block, const Part& part) const;
  const std::shared_ptr<Block>& block_of(BlockId block) const;

  const memory::Tier tier_;
  const Allocate allocate_;
  device::Device* const device_;
  std::vector<std::shared_ptr<Buffer>> buffers_;
  std::vector<std::shared_ptr<Block>> blocks_;  // by id
  StoreCounts counts_;
};

}  // namespace strata::offload
