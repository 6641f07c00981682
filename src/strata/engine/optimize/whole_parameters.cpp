#include "strata/engine/optimize/whole_parameters.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"
#include "strata/offload/host_memory.h"

namespace strata::engine {
namespace {

constexpr Numel kWindow{std::int64_t{16} << 20};  // elements of all slices together

}  // namespace

void require_undivided_shards(const comm::ShardPosition& place) {
  if (place.parts > 1)
    throw ConfigError(
        "zero_optimization.zero_hpz_partition_size: an optimizer that needs whole parameters does "
        "not work with secondary shards; remove the key, or take an optimizer that updates element "
        "by element, such as AdamW");
}

WholeParameters::WholeParameters(OptimizerShards& shards, comm::Collectives& collectives,
                                 device::Device& device, Options options)
    : shards_(shards),
      collectives_(collectives),
      device_(device),
      place_(collectives.shard_position()),
      options_(std::move(options)),
      loads_(static_cast<std::size_t>(place_.count)),
      charge_(device.ledger(), memory::Tier::kDevice, memory::Kind::kStaging, Bytes()) {
  require_undivided_shards(place_);
  plan_owners();
  std::string text;
  for (const auto& [param, owner] : owner_)
    text += fmt::format("{}: {}\n", shards_.weights().param(param).name, owner);
  agree_on_text(collectives_, "owner of whole parameter", text);
}

void WholeParameters::plan_owners() {
  std::vector<plan::Slot> added;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = nth(shards_.weights().units(), shard.unit);
    for (const plan::Slot& slot : unit.layout.slots()) {
      const bool is_member = shards_.weights().param(slot.param).group >= 0;
      if (unit.expects(slot) && is_member && !owner_.contains(slot.param)) added.push_back(slot);
    }
  }
  std::ranges::sort(added, [](const plan::Slot& one, const plan::Slot& other) {
    return std::pair(other.numel, one.param) < std::pair(one.numel, other.param);
  });
  for (const plan::Slot& slot : added) {
    const auto least = options_.together ? loads_.begin() : std::ranges::min_element(loads_);
    *least += slot.numel.value;
    owner_[slot.param] = static_cast<int>(least - loads_.begin());
  }
}

void WholeParameters::prepare() {
  plan_owners();
  for (const auto& [param, owner] : owner_) {
    if (owner != place_.index || owned_.contains(param)) continue;
    const Unit& unit = shards_.weights().unit_of(param);
    const Numel numel = shards_.weights().slot_of(param).numel;
    const Bytes all = bytes(numel);
    const auto take = [&](memory::Kind kind) -> std::unique_ptr<device::Memory> {
      if (shards_.states_on_host(unit)) return offload::pinned_memory(device_, all, kind);
      return device_.allocate(all, kind);
    };
    Owned owned;
    owned.memory = take(memory::Kind::kMasterWeights);
    owned.values = owned.memory->bytes().first(all.size());
    owned.gradient_memory = take(memory::Kind::kGradientShards);
    owned.gradients = owned.gradient_memory->bytes().first(all.size());
    device_.fill_zero(owned.values, device_.compute_stream());
    owned_.emplace(param, std::move(owned));
  }
  take_buffers();
}

void WholeParameters::take_buffers() {
  Numel largest;
  for (const OptimizerShards::UnitShard& shard : shards_.units())
    largest = std::max(largest, nth(shards_.weights().units(), shard.unit).layout.shard());
  // Elements of shards go by eights, as the remainders of masters do.
  const Numel window = std::min(largest, kWindow / place_.count / 8 * 8);
  if (window <= window_) return;
  window_ = window;
  const Bytes all = bytes(window) * place_.count;  // one rank may own them
  ++buffers_;
  mine_ = collectives_.allocate(fmt::format("{}.mine.{}", options_.name, buffers_), bytes(window));
  owned_parcels_ = collectives_.allocate(fmt::format("{}.owned.{}", options_.name, buffers_), all);
  charge_ = memory::Charge(device_.ledger(), memory::Tier::kDevice, memory::Kind::kStaging,
                           bytes(window) + all);
}

WholeParameters::Window WholeParameters::window_of(const Unit& unit, Numel begin, Numel end) const {
  Window window{comm::Parcels(place_.count), {}};
  for (int holder = 0; holder < place_.count; ++holder) {
    const Numel slice = unit.layout.shard() * holder;
    for (const plan::Slot& slot : unit.layout.slots()) {
      const auto owner = owner_.find(slot.param);
      const Numel low = std::max(slice + begin, slot.offset);
      const Numel high = std::min(slice + end, slot.end());
      if (owner == owner_.end() || low >= high) continue;
      const Bytes before = window.there.at(holder, owner->second);
      window.pieces.push_back({slot.param, holder, owner->second, low - slot.offset, low - slice,
                               high - low, before, before});
      window.there.add(holder, owner->second, bytes(high - low));
    }
  }
  for (Piece& piece : window.pieces) {
    piece.in_source += window.there.in_source(piece.holder, piece.owner);
    piece.in_target += window.there.in_target(piece.holder, piece.owner);
  }
  return window;
}

void WholeParameters::for_each_window(const Unit& unit,
                                      const std::function<void(const Window&)>& work) const {
  const Numel shard = unit.layout.shard();
  for (Numel begin; begin < shard; begin += window_) {
    const Window window = window_of(unit, begin, std::min(shard, begin + window_));
    if (!window.pieces.empty()) work(window);
  }
}

void WholeParameters::bring(const Unit& unit, std::span<const std::byte> mine, Values values) {
  for_each_window(unit, [&](const Window& window) {
    for (const Piece& piece : window.pieces) {
      if (piece.holder == place_.index)
        copy(part(mine_->local(), piece.in_source, piece.numel),
             part(mine, bytes(piece.at), piece.numel));
    }
    const std::size_t received = window.there.received(place_.index).size();
    collectives_
        .exchange({mine_.get(), owned_parcels_->local().first(received), &window.there},
                  unit.name())
        ->wait();
    for (const Piece& piece : window.pieces) {
      if (piece.owner != place_.index) continue;
      Owned& owned = owned_.at(piece.param);
      copy(part(values == Values::kWeights ? owned.values : owned.gradients, bytes(piece.first),
                piece.numel),
           part(owned_parcels_->local(), piece.in_target, piece.numel));
    }
  });
}

void WholeParameters::send(const Unit& unit, const Take& take) {
  for_each_window(unit, [&](const Window& window) {
    for (const Piece& piece : window.pieces) {
      if (piece.owner == place_.index)
        copy(part(owned_parcels_->local(), piece.in_target, piece.numel),
             part(owned_.at(piece.param).values, bytes(piece.first), piece.numel));
    }
    const comm::Parcels back = window.there.reversed();
    const std::size_t received = back.received(place_.index).size();
    collectives_
        .exchange({owned_parcels_.get(), mine_->local().first(received), &back}, unit.name())
        ->wait();
    for (const Piece& piece : window.pieces) {
      if (piece.holder == place_.index)
        take(piece.param, piece.at,
             Owned::floats_of(part(mine_->local(), piece.in_source, piece.numel)));
    }
  });
}

}  // namespace strata::engine
