#include "strata/cli/buffer_ring.h"

#include <utility>

#include "strata/base/error.h"

namespace strata::cli {

BufferRing::BufferRing(const RingOptions& options, const std::shared_ptr<memory::Ledger>& ledger)
    : buffer_bytes_(options.buffer_bytes),
      stride_(align_up(options.buffer_bytes, memory::page_size())),
      memory_(stride_ * static_cast<std::int64_t>(options.buffers), {.ledger = ledger}),
      transfers_(options.buffers) {
  STRATA_ASSERT(options.buffers > 0 && options.buffer_bytes.value > 0);
}

std::span<std::byte> BufferRing::buffer(std::size_t turn) {
  wait(turn);
  const std::size_t slot = turn % transfers_.size();
  return memory_.bytes().subspan(slot * stride_.size(), buffer_bytes_.size());
}

void BufferRing::started(std::size_t turn, std::unique_ptr<io::Transfer> transfer) {
  auto& slot = transfers_[turn % transfers_.size()];
  STRATA_ASSERT(slot == nullptr);
  slot = std::move(transfer);
}

void BufferRing::wait(std::size_t turn) {
  const auto transfer = std::exchange(transfers_[turn % transfers_.size()], nullptr);
  if (transfer) transfer->wait();
}

void BufferRing::drain() {
  for (std::size_t i = 0; i < transfers_.size(); ++i) wait(i);
}

}  // namespace strata::cli
