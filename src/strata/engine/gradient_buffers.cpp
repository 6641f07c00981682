#include "strata/engine/gradient_buffers.h"

#include "strata/base/error.h"

namespace strata::engine {

GradientBuffers::Buffer GradientBuffers::take(Bytes bytes) {
  auto& free = free_[bytes.size()];
  if (!free.empty()) {
    Buffer buffer = std::move(free.back());
    free.pop_back();
    return buffer;
  }
  auto buffer = std::make_unique<Allocation>();
  buffer->charge = memory::Charge(ledger_, memory::Tier::kDevice, memory::Kind::kGradients, bytes);
  buffer->memory =
      collectives_.allocate(fmt::format("{}.gradients.{}", name_, allocations_++), bytes);
  return buffer;
}

void GradientBuffers::give_back(Buffer buffer) {
  if (buffer == nullptr) return;
  const std::size_t bytes = buffer->memory->local().size();
  free_[bytes].push_back(std::move(buffer));
}

}  // namespace strata::engine
