#include <fmt/core.h>

#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "strata/base/error.h"
#include "strata/memory/host_buffer.h"
#include "strata/memory/ledger.h"
#include "strata/offload/host_memory.h"
#include "strata/offload/make_store.h"

namespace strata::offload {
namespace {

constexpr Bytes kAlignment = 64_B;  // of a block in its buffer

class MemoryStore final : public StateStore {
 public:
  MemoryStore(memory::Tier tier, device::Device& device) : tier_(tier), device_(device) {}

  memory::Tier tier() const override { return tier_; }
  std::vector<BlockId> add_all(std::vector<BlockSpec> blocks) override {
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
    std::map<memory::Kind, std::shared_ptr<Buffer>> buffers;
    for (const auto& [kind, bytes] : used)
      buffers[kind] = std::make_shared<Buffer>(Buffer{kind, allocate(bytes, kind), nullptr, bytes});
    for (const auto& [kind, buffer] : buffers) buffers_.push_back(buffer);
    std::vector<BlockId> ids;
    for (std::size_t i = 0; i < added.size(); ++i) {
      added[i]->buffer = buffers.at(blocks[i].kind);
      ids.push_back(static_cast<BlockId>(blocks_.size()));
      blocks_.push_back(std::move(added[i]));
    }
    return ids;
  }
  void take_back(std::span<const BlockId> added) noexcept override {
    blocks_.resize(blocks_.size() - added.size());
    // Buffers of theirs are in use by no other block: those of one call share none with another's.
    std::erase_if(buffers_, [](const auto& buffer) { return buffer.use_count() == 1; });
  }
  Bytes size_of(BlockId block) const override { return block_of(block)->size; }
  std::vector<std::unique_ptr<Lease>> fetch_all(std::span<const Part> parts,
                                                Access /*access*/) override {
    require_apart(parts);
    const std::scoped_lock lock(*mutex_);
    for (const Part& part : parts) require_fetchable(*block_of(part.block), part);
    std::vector<std::unique_ptr<Lease>> leases;
    for (const Part& part : parts)
      leases.push_back(std::make_unique<PartLease>(mutex_, block_of(part.block), part));
    const auto count = static_cast<std::int64_t>(parts.size());
    counts_.parts += count;
    counts_.parts_ready += count;
    return leases;
  }
  void offload_states(memory::Kind kind, bool pinned) override {
    if (tier_ == memory::Tier::kHost) return;
    for (const auto& block : blocks_) {
      if (block->buffer->kind == kind && !block->leased.empty())
        throw_leased(*block->leased.begin(), block->name);
    }
    std::vector<OffloadedMemory> memory;
    for (const auto& buffer : buffers_) {
      if (buffer->kind == kind && buffer->memory != nullptr)
        memory.push_back({buffer->memory->bytes(), &buffer->offloaded});
    }
    offload_all(device_, memory, kind, pinned);
    for (const auto& buffer : buffers_) {
      if (buffer->offloaded != nullptr) buffer->memory.reset();
    }
  }
  void reload_states() override {
    for (const auto& buffer : buffers_) {
      if (buffer->offloaded == nullptr) continue;
      buffer->memory = allocate(buffer->bytes, buffer->kind);
      reload(device_, buffer->offloaded, buffer->memory->bytes());
    }
  }
  bool cache(std::span<const BlockId> blocks, device::Stream& stream) override {
    if (tier_ != memory::Tier::kHost) return false;
    std::vector<std::unique_ptr<device::Memory>> there;
    try {
      for (const BlockId block : blocks)
        there.push_back(device_.allocate(block_of(block)->size, block_of(block)->buffer->kind));
    } catch (const OutOfMemoryError&) {
      return false;
    }
    const std::scoped_lock lock(*mutex_);
    for (const BlockId block : blocks) {
      if (!block_of(block)->leased.empty()) return false;
    }
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      Block& block = *block_of(blocks[i]);
      device_.copy(there[i]->bytes(), block.on_host(), stream);
      block.cached = std::move(there[i]);
    }
    caching_ = &stream;
    return true;
  }
  bool cached(BlockId block) const override {
    const std::scoped_lock lock(*mutex_);
    return block_of(block)->cached != nullptr;
  }
  void drop_cached() override {
    const std::scoped_lock lock(*mutex_);
    std::vector<Block*> dropped;
    for (const auto& block : blocks_) {
      if (block->cached != nullptr && block->leased.empty()) dropped.push_back(block.get());
    }
    if (dropped.empty()) return;
    const std::unique_ptr<device::Stream> back = device_.create_stream();
    back->wait_for(*device_.compute_stream().record());
    back->wait_for(*caching_->record());
    for (Block* const block : dropped) {
      if (const auto used = std::exchange(block->used, nullptr)) back->wait_for(*used);
      device_.copy(block->on_host(), block->cached->bytes(), *back);
    }
    back->synchronize();
    for (Block* const block : dropped) block->cached.reset();
  }
  StoreCounts counts() const override { return counts_; }

 private:
  // The blocks of one kind that one add_all() added.
  struct Buffer {
    memory::Kind kind;
    std::unique_ptr<device::Memory> memory;  // null: offloaded
    std::unique_ptr<OffloadedCopy> offloaded = nullptr;
    Bytes bytes = {};
  };

  struct Block {
    std::string name;
    Bytes size;
    std::shared_ptr<Buffer> buffer;
    Bytes offset;
    std::multiset<Part> leased;  // empty ones any number of times
    std::unique_ptr<device::Memory> cached = nullptr;
    std::unique_ptr<device::Event> used = nullptr;  // the last use in a stream that is told
    std::span<std::byte> on_host() const {
      return buffer->memory->bytes().subspan(offset.size(), size.size());
    }
  };

  class PartLease final : public Lease {
   public:
    PartLease(std::shared_ptr<std::mutex> mutex, std::shared_ptr<Block> block, const Part& part)
        : mutex_(std::move(mutex)),
          block_(std::move(block)),
          leased_(block_->leased.insert(part)) {}
    ~PartLease() override {
      const std::scoped_lock lock(*mutex_);
      block_->leased.erase(leased_);
    }
    void used_in(device::Stream& stream) override {
      if (block_->cached != nullptr) block_->used = stream.record();
    }
    std::span<std::byte> bytes() override {
      const std::span<std::byte> all =
          block_->cached != nullptr ? block_->cached->bytes() : block_->on_host();
      return all.subspan(leased_->begin.size(), leased_->bytes().size());
    }

   private:
    const std::shared_ptr<std::mutex> mutex_;
    const std::shared_ptr<Block> block_;
    const std::multiset<Part>::const_iterator leased_;
  };

  // Makes zeroed memory.
  std::unique_ptr<device::Memory> allocate(Bytes bytes, memory::Kind kind) const {
    if (tier_ == memory::Tier::kHost) return pinned_memory(device_, bytes, kind);
    auto memory = device_.allocate(bytes, kind);
    device_.fill_zero(memory->bytes(), device_.compute_stream());
    return memory;
  }
  void require_fetchable(const Block& block, const Part& part) const {
    require_part(part, block.name, block.size);
    if (block.buffer->memory == nullptr) throw_offloaded(fmt::format("block '{}'", block.name));
    for (const Part& leased : block.leased) {
      if (leased.overlaps(part)) throw_leased(leased, block.name);
    }
  }
  const std::shared_ptr<Block>& block_of(BlockId block) const {
    if (block < 0 || static_cast<std::size_t>(block) >= blocks_.size())
      throw UsageError(
          "no such block in the {} store: use the ids that add() returned; block {}, {} blocks",
          memory::name_of(tier_), block, blocks_.size());
    return blocks_[static_cast<std::size_t>(block)];
  }

  const memory::Tier tier_;
  device::Device& device_;
  // Guards leases, and what is cached; leases may outlive the store.
  const std::shared_ptr<std::mutex> mutex_ = std::make_shared<std::mutex>();
  device::Stream* caching_ = nullptr;  // in which cached blocks are copied and updated
  std::vector<std::shared_ptr<Buffer>> buffers_;
  std::vector<std::shared_ptr<Block>> blocks_;  // by id
  StoreCounts counts_;
};

}  // namespace

std::unique_ptr<StateStore> make_memory_store(memory::Tier tier, device::Device& device) {
  return std::make_unique<MemoryStore>(tier, device);
}

}  // namespace strata::offload
