#include "strata/engine/checkpoint/staging_ring.h"

#include <utility>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

Bytes granule_of(const StagingOptions& options) {
  const bool small = options.buffer_bytes < io::File::kDirectBlock;
  return small ? memory::Arena::kDefaultGranule : io::File::kDirectBlock;
}

}  // namespace

Bytes StagingRing::room(const StagingOptions& options) {
  return align_up(options.buffer_bytes, granule_of(options)) * options.buffers;
}

void StagingRing::expect(const StagingOptions& options, device::Device& device) {
  device.expect_host(room(options), memory::Kind::kStaging);
}

StagingRing::StagingRing(const StagingOptions& options, device::Device& device)
    : buffer_bytes_(options.buffer_bytes) {
  if (options.buffers <= 0 || options.buffer_bytes < 16_B) {
    throw UsageError(
        fmt::format("staging needs at least one buffer of 16 bytes; got {} buffers of {} bytes",
                    options.buffers, options.buffer_bytes.value));
  }
  memory_ = device.allocate_host(room(options), memory::Kind::kStaging);
  memory::Arena arena(memory_->bytes(), granule_of(options));
  for (int i = 0; i < options.buffers; ++i) {
    auto extent = arena.try_allocate(buffer_bytes_);
    STRATA_ASSERT(extent.has_value());
    slots_.push_back({std::move(*extent), nullptr, nullptr});
  }
}

StagingRing::~StagingRing() {
  abandon();
}

void StagingRing::abandon() noexcept {
  for (Slot& each : slots_) {
    each.transfer.reset();  // waits
    const std::unique_ptr<device::Event> event = std::exchange(each.event, nullptr);
    try {
      if (event) event->wait();
    } catch (const std::exception&) {
      continue;  // the device has failed; whoever waits for its work is told
    }
  }
}

void StagingRing::wait(Slot& slot) {
  const std::unique_ptr<io::Transfer> transfer = std::exchange(slot.transfer, nullptr);
  if (transfer) transfer->wait();
  const std::unique_ptr<device::Event> event = std::exchange(slot.event, nullptr);
  if (event) event->wait();
}

std::span<std::byte> StagingRing::buffer(std::size_t turn) {
  wait(slot(turn));
  return slot(turn).memory.bytes();
}

void StagingRing::started(std::size_t turn, std::unique_ptr<io::Transfer> transfer) {
  STRATA_ASSERT(slot(turn).transfer == nullptr);
  slot(turn).transfer = std::move(transfer);
}

void StagingRing::used_until(std::size_t turn, std::unique_ptr<device::Event> event) {
  slot(turn).event = std::move(event);
}

void StagingRing::drain() {
  for (Slot& each : slots_) wait(each);
}

}  // namespace strata::engine
