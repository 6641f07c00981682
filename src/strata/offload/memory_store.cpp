#include "strata/offload/memory_store.h"

#include <fmt/format.h>

#include <map>
#include <set>
#include <utility>

#include "strata/base/error.h"
#include "strata/memory/byte_budget.h"
#include "strata/memory/host_buffer.h"

namespace strata::offload {
namespace {

constexpr Bytes kAlignment = 64_B;  // of a block in its buffer

class PlainMemory final : public device::Memory {
 public:
  PlainMemory(memory::HostBuffer buffer, memory::ByteBudget::Hold hold)
      : buffer_(std::move(buffer)), hold_(std::move(hold)) {}
  std::span<std::byte> bytes() override { return buffer_.bytes(); }

 private:
  memory::HostBuffer buffer_;
  memory::ByteBudget::Hold hold_;
};

class PinnedMemory final : public device::Memory {
 public:
  PinnedMemory(std::unique_ptr<device::HostMemory> memory, memory::ByteBudget::Hold hold)
      : memory_(std::move(memory)), hold_(std::move(hold)) {}
  std::span<std::byte> bytes() override { return memory_->bytes(); }

 private:
  std::unique_ptr<device::HostMemory> memory_;
  memory::ByteBudget::Hold hold_;
};

std::unique_ptr<device::Memory> pinned_memory(device::Device& device, Bytes bytes,
                                              memory::Kind kind, memory::ByteBudget::Hold hold) {
  auto memory = device.allocate_host(bytes, kind);
  if (bytes.value > 0 && !memory->pinned()) {
    throw OutOfMemoryError(fmt::format(
        "the system does not let this process pin the host memory that kernels of {} are to work "
        "on ({}): {} wanted; raise the limit on locked memory (ulimit -l); held: {}",
        device.name(), memory::name_of(kind), to_string(bytes), device.ledger()->report()));
  }
  return std::make_unique<PinnedMemory>(std::move(memory), std::move(hold));
}

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
  std::shared_ptr<device::Memory> memory;
  Bytes offset;
  std::multiset<Part> leased;  // empty ones any number of times
};

class MemoryStore::PartLease final : public Lease {
 public:
  PartLease(std::shared_ptr<Block> block, const Part& part)
      : block_(std::move(block)), leased_(block_->leased.insert(part)) {}
  ~PartLease() override { block_->leased.erase(leased_); }
  PartLease(const PartLease&) = delete;
  PartLease& operator=(const PartLease&) = delete;
  std::span<std::byte> bytes() override {
    const Bytes begin = block_->offset + leased_->begin;
    return block_->memory->bytes().subspan(begin.size(), leased_->bytes().size());
  }

 private:
  const std::shared_ptr<Block> block_;
  const std::multiset<Part>::const_iterator leased_;
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
    const bool of_device = options.device != nullptr;
    const auto& ledger = of_device ? options.device->ledger() : options.ledger;
    auto hold = take_part(budget, bytes, kind, ledger.get());
    if (of_device) return pinned_memory(*options.device, bytes, kind, std::move(hold));
    memory::HostBuffer buffer(bytes, {.ledger = options.ledger,
                                      .tier = memory::Tier::kHost,
                                      .kind = kind,
                                      .touch = options.touch});
    return std::make_unique<PlainMemory>(std::move(buffer), std::move(hold));
  };
  return std::unique_ptr<MemoryStore>(new MemoryStore(memory::Tier::kHost, std::move(allocate)));
}

MemoryStore::MemoryStore(memory::Tier tier, Allocate allocate)
    : tier_(tier), allocate_(std::move(allocate)) {}

std::vector<BlockId> MemoryStore::add_all(std::vector<BlockSpec> blocks) {
  std::map<memory::Kind, Bytes> used;
  std::vector<std::shared_ptr<Block>> added;
  for (BlockSpec& spec : blocks) {
    STRATA_ASSERT(spec.bytes.value >= 0);
    Bytes& end = used[spec.kind];
    const Bytes offset = align_up(end, kAlignment);
    end = offset + spec.bytes;
    added.push_back(std::make_shared<Block>(
        Block{std::move(spec.name), spec.bytes, nullptr, offset, /*leased=*/{}}));
  }
  std::map<memory::Kind, std::shared_ptr<device::Memory>> memory;
  for (const auto& [kind, bytes] : used) memory[kind] = allocate_(bytes, kind);
  std::vector<BlockId> ids;
  for (std::size_t i = 0; i < added.size(); ++i) {
    added[i]->memory = memory.at(blocks[i].kind);
    ids.push_back(static_cast<BlockId>(blocks_.size()));
    blocks_.push_back(std::move(added[i]));
  }
  return ids;
}

Bytes MemoryStore::size_of(BlockId block) const {
  return block_of(block)->size;
}

std::vector<std::unique_ptr<Lease>> MemoryStore::fetch_together(std::span<const Part> parts,
                                                                Access /*access*/) {
  require_apart(parts);
  for (const Part& part : parts) {
    const Block& block = *block_of(part.block);
    require_part(part, block.name, block.size);
    for (const Part& leased : block.leased) {
      if (leased.overlaps(part)) throw_leased(leased, block.name);
    }
  }
  std::vector<std::unique_ptr<Lease>> leases;
  for (const Part& part : parts)
    leases.push_back(std::make_unique<PartLease>(block_of(part.block), part));
  const auto count = static_cast<std::int64_t>(parts.size());
  counts_.parts += count;
  counts_.parts_ready += count;
  return leases;
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
