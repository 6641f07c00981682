// StateStore on a drive. Blocks lie in one range of bytes, at multiples of 4 KiB; add_all() takes
// their space. Leases lie in an arena of host memory, where the device's kernels work on them. A
// lease covers a part of a block, so a block may be larger than the arena, and there may be any
// number of blocks. The store writes returned parts to the drive while the caller continues. Once
// one round of fetches has shown the order, the store prefetches the next parts.
//
// Threads: one at a time, that of the arena. Ownership: keeps arena and file; the device outlives
// the store and its leases. Memory: the charged arena, and some bytes a page. Errors:
// as StateStore says. An IoError names the block, the path, offset, wanted and got bytes.
#pragma once

#include <memory>
#include <vector>

#include "strata/device/device.h"
#include "strata/offload/block_file.h"
#include "strata/offload/fetch_sequence.h"
#include "strata/offload/staging_arena.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

class DriveBlocks;
class PartCache;

struct NvmeStoreOptions {
  std::shared_ptr<StagingArena> arena;
  std::unique_ptr<BlockFile> file;
  // Keeps a checksum of each page that is written, and compares it when the page is read. This
  // costs 8 bytes of memory for 4 KiB, and the time of one pass over the bytes.
  bool verify = false;
  bool read_ahead = true;
};

class NvmeStore final : public StateStore {
 public:
  NvmeStore(device::Device& device, NvmeStoreOptions options);
  ~NvmeStore() override;  // waits for transfers under way
  NvmeStore(const NvmeStore&) = delete;
  NvmeStore& operator=(const NvmeStore&) = delete;

  memory::Tier tier() const override { return memory::Tier::kNvme; }
  std::vector<BlockId> add_all(std::vector<BlockSpec> blocks) override;
  void take_back(std::span<const BlockId> added) noexcept override;
  Bytes size_of(BlockId block) const override;
  std::vector<std::unique_ptr<Lease>> fetch_all(std::span<const Part> parts,
                                                Access access) override;
  // StagingArena::lease_share(). While nothing else is leased, one fetch may lease more.
  Bytes lease_budget(BlockId block) const override;
  void advance() override;
  void flush() override;
  StoreCounts counts() const override;
  void watch(LinkWatch* watch) override;
  std::vector<DriveWrites> wear() const override { return file_->wear(); }
  DriveLimit measure_drives() override;

 private:
  class PartLease;
  class EmptyLease;
  void look_ahead();

  const std::shared_ptr<StagingArena> arena_;
  const std::shared_ptr<BlockFile> file_;
  const std::shared_ptr<DriveBlocks> blocks_;
  const std::shared_ptr<PartCache> cache_;
  const bool read_ahead_;
  FetchSequence sequence_;
};

}  // namespace strata::offload
