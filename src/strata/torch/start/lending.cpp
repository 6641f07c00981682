#include "strata/torch/start/lending.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <string>

#include "strata/base/error.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"

namespace strata::torch {
namespace {

// A parameter of at most this many pieces is gathered at once, because each piece costs the ranks a
// few milliseconds, however small it is.
constexpr std::int64_t kWholePieces = 32;

// For each parameter that has an owner: whether every rank keeps exactly the part that its shard
// holds already.
std::vector<bool> cut_alike(engine::Engine& engine, const std::vector<ModelParameter>& parameters) {
  std::string mine;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].owner == nullptr) continue;
    const int param = static_cast<int>(i);
    const bool alike = !parameters[i].tile && !engine.weights().unit_of(param).whole &&
                       parameters[i].owner->owned_range(parameters[i].owner_index) ==
                           engine.weights().owned_range(param);
    mine += alike ? '1' : '0';
  }
  std::vector<bool> all(mine.size(), true);
  if (mine.empty()) return all;
  for (const std::string& text : engine.collectives().all_gather_text(mine)) {
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = all[i] && text[i] == '1';
  }
  return all;
}

bool may_be_whole(const ModelParameter& parameter, Bytes piece) {
  if (parameter.tile) return false;  // nor is it whole in training
  const std::int64_t bytes =
      c10::multiply_integers(parameter.shape) * parameter.variable.element_size();
  return bytes <= kWholePieces * piece.value;
}

bool same_source(const ModelParameter& a, const ModelParameter& b) {
  return a.owner == b.owner && a.owner_index == b.owner_index;
}

// Stores lent elements of a parameter, from `begin` on, in the engine's parameters: the same one,
// or its tiles, which follow each other from `first` on.
void store_lent(ValueIntake& intake, const std::vector<ModelParameter>& parameters,
                std::size_t first, Numel begin, const at::Tensor& values) {
  const ModelParameter& lent = parameters[first];
  if (!lent.tile) return intake.store(static_cast<int>(first), begin, values);
  const at::Tensor flat = values.reshape({-1});
  const std::int64_t end = begin.value + flat.numel();
  for (std::size_t i = first; i < parameters.size(); ++i) {
    const ModelParameter& tile = parameters[i];
    if (!same_source(tile, lent)) break;
    const std::int64_t tile_begin = tile.tile->first.value;
    const std::int64_t tile_end = tile_begin + c10::multiply_integers(tile.shape);
    const std::int64_t from = std::max(begin.value, tile_begin);
    const std::int64_t to = std::min(end, tile_end);
    if (from >= to) continue;
    intake.store(static_cast<int>(i), Numel(from - tile_begin),
                 flat.slice(0, from - begin.value, to - begin.value));
  }
}

class ShardLending {
 public:
  ShardLending(engine::Engine& engine, c10::Device place, int param, const Borrowing& borrowing)
      : engine_(engine),
        me_(engine.collectives().shard_position().index),
        place_(place),
        borrowing_(borrowing),
        unit_(engine.weights().unit_of(param)),
        slot_(engine.weights().slot_of(param)),
        dtype_(unit_.layout.dtype()),
        most_(std::max<std::int64_t>(1, borrowing.piece / size_of(dtype_))) {}

  void lend() {
    if (!borrowing_.own_part) {
      for (int rank = 0; rank < unit_.layout.world_size(); ++rank) lend_from(rank);
      return;
    }
    const auto [begin, end] = range_of(me_);
    if (begin < end && !unit_.offloaded) {  // lent in place
      use(begin, unit_.shard.data() + bytes_of(in_shard(begin), dtype_).size(), end - begin);
    } else {
      lend_from(me_);
    }
  }

 private:
  // Piece by piece; of another rank, or for others, by broadcasts.
  void lend_from(int rank) {
    const auto [begin, end] = range_of(rank);
    for (Numel at = begin; at < end; at += most_) {
      const Numel count = std::min(most_, end - at);
      if (rank == me_) read(at, count);
      if (!borrowing_.own_part)
        engine_.collectives().broadcast(piece().first(bytes_of(count, dtype_).size()), rank);
      use(at, piece().data(), count);
    }
  }

  // The offset in this rank's shard of an element of the parameter.
  Numel in_shard(Numel at) const { return slot_.offset + at - unit_.layout.shard() * me_; }

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
    const Numel first = in_shard(at);
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
  int me_;  // this rank's index among shards
  c10::Device place_;
  const Borrowing& borrowing_;
  const engine::Unit& unit_;
  const plan::Slot& slot_;
  DType dtype_;
  Numel most_;                              // elements of a piece
  std::unique_ptr<device::Memory> memory_;  // of a piece; null: not needed yet
};

}  // namespace

void ValueIntake::store(int param, Numel begin, const at::Tensor& values) {
  STRATA_ASSERT(values.is_contiguous() && values.device() == place_);
  engine_.weights().enqueue_store_everywhere(param, begin, Numel(values.numel()),
                                             const_bytes(values).data(),
                                             from_scalar_type(values.scalar_type()));
}

at::Tensor ValueIntake::piece_like(const at::Tensor& values) {
  if (piece_ == nullptr) piece_ = engine_.device().allocate(kPiece, memory::Kind::kStaging);
  STRATA_ASSERT(values.nbytes() <= piece_->bytes().size());
  return tensor_over(piece_->bytes().data(), values.numel(), values.scalar_type(), place_);
}

void ValueIntake::store_from_rank_0(int param, Numel begin, const at::Tensor& values) {
  at::Tensor piece = piece_like(values);
  if (engine_.collectives().rank() == 0) piece.copy_(values.detach().view({-1}));
  engine_.collectives().broadcast(mutable_bytes(piece), 0);
  store(param, begin, piece);
}

void take_from_owners(engine::Engine& engine, ValueIntake& intake,
                      const std::vector<ModelParameter>& parameters, Bytes piece) {
  const std::vector<bool> alike = cut_alike(engine, parameters);
  // In an order that all ranks share, since retiring an owner is collective.
  std::vector<std::shared_ptr<ParameterOwner>> owners;
  std::size_t position = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ModelParameter& parameter = parameters[i];
    if (parameter.owner == nullptr) continue;
    const bool own_part = alike[position++];
    if (i > 0 && same_source(parameter, parameters[i - 1])) continue;  // lent with the first tile
    const Borrowing borrowing{piece, own_part, may_be_whole(parameter, piece),
                              [&](Numel begin, const at::Tensor& values) {
                                store_lent(intake, parameters, i, begin, values);
                              }};
    parameter.owner->lend_values(parameter.owner_index, borrowing);
    if (std::find(owners.begin(), owners.end(), parameter.owner) == owners.end())
      owners.push_back(parameter.owner);
  }
  if (owners.empty()) return;
  engine.collectives().barrier();  // peers have read the memory that is freed next
  for (const auto& owner : owners) owner->retire();
  engine.collectives().barrier();  // all have freed their shards
  for (const auto& owner : owners) owner->unmap_freed();
}

bool lends_pieces(engine::Engine& engine) {
  const comm::ShardPosition place = engine.collectives().shard_position();
  return place.groups == 1 && place.parts == 1;
}

void lend_pieces(engine::Engine& engine, c10::Device place, int param, const Borrowing& borrowing) {
  ShardLending lending(engine, place, param, borrowing);
  lending.lend();
  engine.device().compute_stream().synchronize();  // the piece's memory is freed now
}

}  // namespace strata::torch
