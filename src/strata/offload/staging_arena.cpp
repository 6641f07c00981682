#include "strata/offload/staging_arena.h"

#include <utility>

#include "strata/base/error.h"

namespace strata::offload {
namespace {

std::unique_ptr<device::HostMemory> staging_memory(device::Device& device, Bytes budget) {
  const Bytes bytes = budget - budget % kPartAlignment;
  if (bytes < kPartAlignment) {
    throw UsageError("a staging arena needs a budget of {} at least: {} given",
                     to_string(kPartAlignment), to_string(budget));
  }
  auto memory = device.allocate_host(bytes, memory::Kind::kStaging);
  if (!memory->pinned()) {
    throw OutOfMemoryError(
        "the system does not let this process pin the memory that states on a drive are staged "
        "through: {} wanted; raise the limit on locked memory (ulimit -l) or lower the budget; "
        "held: {}",
        to_string(bytes), device.ledger()->report());
  }
  return memory;
}

}  // namespace

StagingArena::StagingArena(device::Device& device, Bytes budget)
    : memory_(staging_memory(device, budget)), arena_(memory_->bytes(), kPartAlignment) {}

Bytes StagingArena::lease_share() const {
  const auto holders = std::max<std::int64_t>(1, std::ssize(holders_));
  const Bytes share = budget() / (kShares * holders);
  return std::max(share - share % kPartAlignment, kPartAlignment);
}

std::optional<memory::Extent> StagingArena::try_take(Bytes bytes) {
  return arena_.try_allocate(bytes);
}

std::optional<memory::Extent> StagingArena::take_spare(Bytes bytes, Holder& asks) {
  while (true) {
    if (auto extent = try_take(bytes)) return extent;
    if (!make_way(Effort::kNone, &asks)) return std::nullopt;
  }
}

std::optional<std::vector<memory::Extent>> StagingArena::take_together(std::span<const Bytes> sizes,
                                                                       Holder* asks) {
  while (true) {
    if (auto extents = try_together(sizes)) return extents;
    if (!make_way(Effort::kNone, asks) && !make_way(Effort::kWait, asks) &&
        !make_way(Effort::kReadAgain, asks)) {
      return std::nullopt;
    }
  }
}

std::optional<std::vector<memory::Extent>> StagingArena::try_together(
    std::span<const Bytes> sizes) {
  std::vector<memory::Extent> extents;
  for (const Bytes size : sizes) {
    auto extent = arena_.try_allocate(size);
    if (!extent) return std::nullopt;
    extents.push_back(std::move(*extent));
  }
  return extents;
}

bool StagingArena::make_way(Effort effort, Holder* asks) {
  if (asks != nullptr && asks->free_memory(effort)) return true;
  return std::ranges::any_of(
      holders_, [&](Holder* holder) { return holder != asks && holder->free_memory(effort); });
}

}  // namespace strata::offload
