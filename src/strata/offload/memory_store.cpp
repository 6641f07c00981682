#include "strata/offload/memory_store.h"

#include <fmt/format.h>

#include <utility>

#include "strata/base/error.h"
#include "strata/memory/byte_budget.h"
#include "strata/memory/host_buffer.h"

namespace strata::offload {
namespace {

class HostMemory final : public device::Memory {
 public:
  HostMemory(memory::HostBuffer buffer, memory::ByteBudget::Hold hold)
      : buffer_(std::move(buffer)), hold_(std::move(hold)) {}
  std::span<std::byte> bytes() override { return buffer_.bytes(); }

 private:
  memory::HostBuffer buffer_;
  memory::ByteBudget::Hold hold_;
};

// A limit given to the store, its part taken for one block; an empty hold where there is no limit.
memory::ByteBudget::Hold take_part(const std::shared_ptr<memory::ByteBudget>& budget, Bytes bytes,
                                   memory::Kind kind, const memory::Ledger* ledger) {
  if (!budget) return {};
  auto hold = budget->take(bytes);
  if (!hold) {
    throw OutOfMemoryError(fmt::format(
        "the host store is out of memory ({}): {} wanted, {} left of its limit of {}; raise the "
        "limit or "
        "shard over more ranks; held: {}",
        memory::name_of(kind), to_string(bytes), to_string(budget->left()),
        to_string(budget->limit()), ledger != nullptr ? ledger->report() : "not counted"));
  }
  return std::move(*hold);
}

}  // namespace

struct MemoryStore::Block {
  std::string name;
  Bytes size;
  std::unique_ptr<device::Memory> memory;
  bool leased = false;
};

class MemoryStore::BlockLease final : public Lease {
 public:
  explicit BlockLease(std::shared_ptr<Block> block) : block_(std::move(block)) {
    block_->leased = true;
  }
  ~BlockLease() override { block_->leased = false; }
  BlockLease(const BlockLease&) = delete;
  BlockLease& operator=(const BlockLease&) = delete;
  std::span<std::byte> bytes() override { return block_->memory->bytes(); }

 private:
  const std::shared_ptr<Block> block_;
};

std::unique_ptr<MemoryStore> MemoryStore::on_device(device::Device& device) {
  auto allocate = [&device](Bytes bytes, memory::Kind kind) {
    auto memory = device.allocate(bytes, kind);
    device.fill_zero(memory->bytes(), device.compute_stream());
    return memory;
  };
  return std::unique_ptr<MemoryStore>(new MemoryStore(memory::Tier::kDevice, std::move(allocate)));
}

std::unique_ptr<MemoryStore> MemoryStore::on_host(HostStoreOptions options) {
  auto budget = options.memory_limit ? memory::ByteBudget::create(*options.memory_limit) : nullptr;
  auto allocate = [options = std::move(options), budget = std::move(budget)](
                      Bytes bytes, memory::Kind kind) -> std::unique_ptr<device::Memory> {
    auto hold = take_part(budget, bytes, kind, options.ledger.get());
    memory::HostBuffer buffer(bytes, {.ledger = options.ledger,
                                      .tier = memory::Tier::kHost,
                                      .kind = kind,
                                      .touch = options.touch});
    return std::make_unique<HostMemory>(std::move(buffer), std::move(hold));
  };
  return std::unique_ptr<MemoryStore>(new MemoryStore(memory::Tier::kHost, std::move(allocate)));
}

MemoryStore::MemoryStore(memory::Tier tier, Allocate allocate)
    : tier_(tier), allocate_(std::move(allocate)) {}

BlockId MemoryStore::add(std::string name, Bytes bytes, memory::Kind kind) {
  STRATA_ASSERT(bytes.value >= 0);
  auto block = std::make_shared<Block>();
  block->name = std::move(name);
  block->size = bytes;
  block->memory = allocate_(bytes, kind);
  blocks_.push_back(std::move(block));
  return static_cast<BlockId>(blocks_.size() - 1);
}

Bytes MemoryStore::size_of(BlockId block) const {
  return block_of(block)->size;
}

std::unique_ptr<Lease> MemoryStore::fetch(BlockId block, Access /*access*/) {
  const std::shared_ptr<Block>& found = block_of(block);
  if (found->leased) {
    throw UsageError(fmt::format(
        "block '{}' is leased already: give its lease back before it is fetched again; block {}",
        found->name, block));
  }
  return std::make_unique<BlockLease>(found);
}

const std::shared_ptr<MemoryStore::Block>& MemoryStore::block_of(BlockId block) const {
  if (block < 0 || static_cast<std::size_t>(block) >= blocks_.size()) {
    throw UsageError(fmt::format(
        "no such block in the {} store: use the ids that add() returned; block {}, {} blocks",
        memory::name_of(tier_), block, blocks_.size()));
  }
  return blocks_[static_cast<std::size_t>(block)];
}

}  // namespace strata::offload
