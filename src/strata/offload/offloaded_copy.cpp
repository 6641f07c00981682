#include "strata/offload/offloaded_copy.h"

#include <fmt/core.h>

#include <utility>

#include "strata/base/error.h"
#include "strata/memory/host_buffer.h"

namespace strata::offload {
namespace {

class OrdinaryMemory final : public device::Memory {
 public:
  explicit OrdinaryMemory(memory::HostBuffer buffer) : buffer_(std::move(buffer)) {}
  std::span<std::byte> bytes() override { return buffer_.bytes(); }

 private:
  memory::HostBuffer buffer_;
};

std::unique_ptr<device::Memory> host_memory(device::Device& device, Bytes bytes, memory::Kind kind,
                                            bool pinned) {
  if (pinned) return device.allocate_host(bytes, kind);
  return std::make_unique<OrdinaryMemory>(memory::HostBuffer(
      bytes, {.ledger = device.ledger(), .tier = memory::Tier::kHost, .kind = kind}));
}

}  // namespace

OffloadedCopy::OffloadedCopy(device::Device& device, Bytes bytes, memory::Kind kind, bool pinned)
    : device_(device), memory_(host_memory(device, bytes, kind, pinned)) {}

void OffloadedCopy::take(std::span<const std::byte> source) {
  device_.copy(memory_->bytes(), source, device_.compute_stream());
}

void OffloadedCopy::give_back(std::span<std::byte> target) {
  device_.copy(target, memory_->bytes(), device_.compute_stream());
}

void throw_offloaded(std::string_view what) {
  throw UsageError(
      fmt::format("{} cannot be used now, since offload_states() has moved it to the host; call "
                  "reload_states() first",
                  what));
}

}  // namespace strata::offload
