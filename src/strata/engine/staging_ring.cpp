#include "strata/engine/staging_ring.h"

#include <utility>

#include "strata/base/error.h"

namespace strata::engine {

StagingRing::StagingRing(const StagingOptions& options,
                         const std::shared_ptr<memory::Ledger>& ledger)
    : buffer_bytes_(options.buffer_bytes) {
  if (options.buffers <= 0 || options.buffer_bytes < 16_B) {
    throw UsageError(
        fmt::format("staging needs at least one buffer of 16 bytes; got {} buffers of {} bytes",
                    options.buffers, options.buffer_bytes.value));
  }
  memory::HostBufferOptions memory;
  memory.ledger = ledger;
  for (int i = 0; i < options.buffers; ++i) {
    slots_.push_back({memory::HostBuffer(buffer_bytes_, memory), nullptr});
  }
}

StagingRing::~StagingRing() = default;

void StagingRing::wait(Slot& slot) {
  const std::unique_ptr<io::Transfer> transfer = std::exchange(slot.transfer, nullptr);
  if (transfer) transfer->wait();
}

std::span<std::byte> StagingRing::buffer(std::size_t turn) {
  wait(slot(turn));
  return slot(turn).memory.bytes();
}

void StagingRing::started(std::size_t turn, std::unique_ptr<io::Transfer> transfer) {
  STRATA_ASSERT(slot(turn).transfer == nullptr);
  slot(turn).transfer = std::move(transfer);
}

void StagingRing::drain() {
  for (Slot& each : slots_) wait(each);
}

}  // namespace strata::engine
