#include "strata/torch/sharded/shard_lending.h"

#include <algorithm>

#include "strata/torch/base/dtype.h"
#include "strata/torch/base/placement.h"

namespace strata::torch {
namespace {

class ShardLending {
 public:
  ShardLending(engine::Engine& engine, c10::Device place, int param, const Borrowing& borrowing)
      : engine_(engine),
        place_(place),
        borrowing_(borrowing),
        unit_(engine.weights().unit_of(param)),
        slot_(engine.weights().slot_of(param)),
        dtype_(unit_.layout.dtype()),
        most_(std::max<std::int64_t>(1, borrowing.piece / size_of(dtype_))) {}

  void lend_own() {
    const Numel before = unit_.layout.shard() * engine_.collectives().shard_position().index;
    const auto [begin, end] = range_of(engine_.collectives().shard_position().index);
    if (begin >= end) return;
    if (!unit_.offloaded) {  // lent in place
      const std::span<std::byte> bytes =
          unit_.shard.subspan(bytes_of(slot_.offset + begin - before, dtype_).size());
      use(begin, bytes.data(), end - begin);
      return;
    }
    for (Numel at = begin; at < end; at += most_) {
      const Numel count = std::min(most_, end - at);
      read(at, count);
      use(at, piece().data(), count);
    }
  }

  void lend_all() {
    for (int rank = 0; rank < unit_.layout.world_size(); ++rank) {
      const auto [begin, end] = range_of(rank);
      for (Numel at = begin; at < end; at += most_) {
        const Numel count = std::min(most_, end - at);
        if (rank == engine_.collectives().shard_position().index) read(at, count);
        engine_.collectives().broadcast(piece().first(bytes_of(count, dtype_).size()), rank);
        use(at, piece().data(), count);
      }
    }
  }

 private:
  // The elements of the parameter that lie in a rank's shard.
  std::pair<Numel, Numel> range_of(int rank) const {
    const Numel shard = unit_.layout.shard();
    const Numel low = std::max(shard * rank, slot_.offset);
    const Numel high = std::min(shard * (rank + 1), slot_.end());
    return {low - slot_.offset, std::max(low, high) - slot_.offset};
  }

  std::span<std::byte> piece() {
    if (memory_ == nullptr)
      memory_ = engine_.device().allocate(bytes_of(most_, dtype_), memory::Kind::kStaging);
    return memory_->bytes();
  }

  // Copies elements of this rank's shard to the piece.
  void read(Numel at, Numel count) {
    const Numel before = unit_.layout.shard() * engine_.collectives().shard_position().index;
    const Numel first = slot_.offset + at - before;
    std::byte* const target = piece().data();
    device::Device& device = engine_.device();
    engine_.weights().shards().for_each(
        unit_.id, first, first + count, offload::Access::kRead,
        [&](const engine::WeightShards::Piece& part) {
          device.copy({target + bytes_of(part.begin - first, dtype_).size(), part.bytes.size()},
                      part.bytes, device.compute_stream());
        });
  }

  void use(Numel begin, const std::byte* values, Numel count) {
    borrowing_.use(begin, tensor_over(values, count.value, to_scalar_type(dtype_), place_));
  }

  engine::Engine& engine_;
  c10::Device place_;
  const Borrowing& borrowing_;
  const engine::Unit& unit_;
  const plan::Slot& slot_;
  DType dtype_;
  Numel most_;                              // elements of a piece
  std::unique_ptr<device::Memory> memory_;  // of a piece; null: not needed yet
};

}  // namespace

bool lends_pieces(engine::Engine& engine) {
  const comm::ShardPosition place = engine.collectives().shard_position();
  return place.groups == 1 && place.parts == 1;
}

void lend_pieces(engine::Engine& engine, c10::Device place, int param, const Borrowing& borrowing) {
  ShardLending lending(engine, place, param, borrowing);
  if (borrowing.own_part) {
    lending.lend_own();
  } else {
    lending.lend_all();
  }
  engine.device().compute_stream().synchronize();  // the piece's memory is freed now
}

}  // namespace strata::torch
