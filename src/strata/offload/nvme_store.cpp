#include "strata/offload/nvme_store.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "strata/base/error.h"

namespace strata::offload {
namespace {

constexpr std::size_t kPartsMost = 1 << 20;
constexpr std::int64_t kForgets = 8;  // the part of a round's length that each shorter one takes

std::uint64_t key_of(int before, int last) {
  return (std::uint64_t{static_cast<std::uint32_t>(before)} << 32U) |
         static_cast<std::uint32_t>(last);
}

}  // namespace

std::vector<Part> FetchSequence::record(const Part& part) {
  std::vector<Part> dropped;
  const int index = index_of(part);
  if (index < 0) {  // too many: all over again
    for (const int predicted : predicted_) dropped.push_back(at(predicted).part);
    *this = FetchSequence();
    return dropped;
  }
  const auto found = std::ranges::find(predicted_, index);
  for (auto it = predicted_.begin(); it != found; ++it) dropped.push_back(at(*it).part);
  predicted_.erase(predicted_.begin(), found == predicted_.end() ? found : found + 1);
  learn(index);
  return dropped;
}

int FetchSequence::index_of(const Part& part) {
  const auto found = indices_.find(part);
  if (found != indices_.end()) return found->second;
  if (parts_.size() == kPartsMost) return -1;
  const int index = static_cast<int>(parts_.size());
  indices_.emplace(part, index);
  parts_.push_back({.part = part});
  return index;
}

void FetchSequence::learn(int index) {
  if (current_.last >= 0) {
    at(current_.last).next = index;
    // Random fetches never repeat a pair, so their pairs are worth no memory.
    if (by_two_.size() >= 2 * kPartsMost) by_two_.clear();
    if (current_.before >= 0) by_two_[key_of(current_.before, current_.last)] = index;
  }
  current_ = {current_.last, index};
  std::int64_t& recorded = at(index).recorded;
  ++now_;
  if (recorded > 0) round_ = std::max(now_ - recorded, round_ - round_ / kForgets);
  recorded = now_;
}

FetchSequence::Pair FetchSequence::end() const {
  if (predicted_.empty()) return current_;
  const int before = predicted_.size() > 1 ? *(predicted_.end() - 2) : current_.last;
  return {before, predicted_.back()};
}

int FetchSequence::next_of(Pair at) const {
  if (at.last < 0) return -1;
  const auto found = by_two_.find(key_of(at.before, at.last));
  return found != by_two_.end() ? found->second : parts_[static_cast<std::size_t>(at.last)].next;
}

std::optional<Part> FetchSequence::following() const {
  const int next = next_of(end());
  if (next < 0) return std::nullopt;
  return parts_[static_cast<std::size_t>(next)].part;
}

void FetchSequence::predict_following() {
  if (const int next = next_of(end()); next >= 0) predicted_.push_back(next);
}

class NvmeStore::PartLease final : public Lease {
 public:
  PartLease(std::shared_ptr<PartCache> cache, Access access)
      : cache_(std::move(cache)), access_(access) {}
  ~PartLease() override {
    if (place_) cache_->give_back(*place_, access_, std::move(used_));
  }
  PartLease(const PartLease&) = delete;
  PartLease& operator=(const PartLease&) = delete;
  void hold(PartCache::Place place) noexcept { place_ = place; }
  std::span<std::byte> bytes() override { return PartCache::bytes_of(*place_); }
  void used_in(device::Stream& stream) override { used_ = stream.record(); }

 private:
  const std::shared_ptr<PartCache> cache_;
  std::optional<PartCache::Place> place_;  // nullopt: nothing is lent yet
  const Access access_;
  std::unique_ptr<device::Event> used_;  // null: in the compute stream
};

class NvmeStore::EmptyLease final : public Lease {
 public:
  std::span<std::byte> bytes() override { return {}; }
};

NvmeStore::NvmeStore(device::Device& device, NvmeStoreOptions options)
    : arena_(std::move(options.arena)),
      file_(std::move(options.file)),
      blocks_(std::make_shared<DriveBlocks>(device.ledger(), options.verify)),
      cache_(std::make_shared<PartCache>(device, arena_, blocks_, file_)),
      read_ahead_(options.read_ahead) {
  file_->expect_memory(arena_->memory());
}

std::vector<BlockId> NvmeStore::add_all(std::vector<BlockSpec> blocks) {
  Bytes more;
  for (const BlockSpec& spec : blocks) {
    STRATA_ASSERT(spec.bytes.value >= 0);
    more += align_up(spec.bytes, kPartAlignment);
  }
  file_->grow(blocks_->end() + more);
  std::vector<BlockId> ids;
  ids.reserve(blocks.size());
  try {
    for (BlockSpec& spec : blocks) ids.push_back(blocks_->add(std::move(spec)));
  } catch (...) {
    take_back(ids);
    throw;
  }
  return ids;
}

std::vector<std::unique_ptr<Lease>> NvmeStore::fetch_all(std::span<const Part> parts,
                                                         Access access) {
  require_apart(parts);
  std::vector<Part> staged;
  std::vector<std::unique_ptr<Lease>> leases;
  std::vector<PartLease*> lent;
  // All leases exist before the cache lends any part, so each lent part has an owner at once.
  for (const Part& part : parts) {
    require_part(part, blocks_->name_of(part.block), blocks_->size_of(part.block));
    if (part.bytes().value > 0) {
      auto lease = std::make_unique<PartLease>(cache_, access);
      staged.push_back(part);
      lent.push_back(lease.get());
      leases.push_back(std::move(lease));
    } else {
      leases.push_back(std::make_unique<EmptyLease>());
    }
  }
  const std::vector<PartCache::Place> places = cache_->lease(staged);
  for (std::size_t i = 0; i < places.size(); ++i) lent[i]->hold(places[i]);
  for (const Part& part : staged) {
    for (const Part& dropped : sequence_.record(part)) cache_->forget(dropped);
  }
  cache_->set_round(sequence_.round());
  prefetch();
  return leases;
}

void NvmeStore::advance() {
  cache_->advance();
  prefetch();
}

void NvmeStore::prefetch() {
  if (!read_ahead_) return;
  for (auto next = sequence_.following(); next && cache_->predict(*next);
       next = sequence_.following())
    sequence_.predict_following();
}

}  // namespace strata::offload
