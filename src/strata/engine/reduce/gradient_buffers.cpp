#include "strata/engine/reduce/gradient_buffers.h"

#include <algorithm>

#include "strata/base/error.h"

namespace strata::engine {

GradientBuffers::Buffer GradientBuffers::take(Bytes bytes) {
  Size& size = sizes_[bytes.size()];
  Buffer buffer;
  if (!size.free.empty()) {
    buffer = std::move(size.free.back());
    size.free.pop_back();
  } else {
    buffer = std::make_unique<Allocation>();
    buffer->charge =
        memory::Charge(ledger_, memory::Tier::kDevice, memory::Kind::kGradients, bytes);
    buffer->memory =
        collectives_.allocate(fmt::format("{}.gradients.{}", name_, allocations_++), bytes);
  }
  size.most_in_use = std::max(size.most_in_use, ++size.in_use);
  return buffer;
}

void GradientBuffers::give_back(Buffer buffer) {
  if (buffer == nullptr) return;
  Size& size = sizes_[buffer->memory->local().size()];
  --size.in_use;
  size.free.push_back(std::move(buffer));
}

void GradientBuffers::free_unused() {
  for (auto& [bytes, size] : sizes_) size.free.clear();
}

void GradientBuffers::end_pass() {
  const bool first = passes_ == 0;
  for (auto& [bytes, size] : sizes_) {
    size.recent[passes_ % kPasses] = first ? 0 : size.most_in_use;
    const std::size_t most = first ? size.most_in_use : *std::ranges::max_element(size.recent);
    const std::size_t keep = most - std::min(most, size.in_use);
    if (size.free.size() > keep) size.free.resize(keep);
    size.most_in_use = size.in_use;
  }
  ++passes_;
}

}  // namespace strata::engine
