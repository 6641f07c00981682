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
    const Bytes bytes = bytes_of(numel, DType::kFloat32);
    const auto take = [&](memory::Kind kind) -> std::unique_ptr<device::Memory> {
      if (shards_.states_on_host(unit)) return offload::pinned_memory(device_, bytes, kind);
      return device_.allocate(bytes, kind);
    };
    Owned owned;
    owned.memory = take(memory::Kind::kMasterWeights);
    owned.values = owned.memory->bytes().first(bytes.size());
    owned.gradient_memory = take(memory::Kind::kGradientShards);
    owned.gradients = owned.gradient_memory->bytes().first(bytes.size());
    device_.fill_zero(owned.values, device_.compute_stream());
    owned_.emplace(param, std::move(owned));
  }
  take_buffer();
}

void WholeParameters::take_buffer() {
  Numel largest;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = nth(shards_.weights().units(), shard.unit);
    largest = std::max(largest, unit.layout.shard());
  }
  // Slices of shards begin at multiples of 8 elements, as the remainders of masters do.
  const Numel window = std::min(largest, kWindow / place_.count / 8 * 8);
  if (window <= window_) return;
  window_ = window;
  const Bytes slice = bytes_of(window, DType::kFloat32);
  buffer_ = collectives_.allocate(fmt::format("{}.whole.{}", options_.name, ++buffers_),
                                  slice * place_.count);
  slice_ = device_.allocate(bytes_of(window, DType::kFloat32), memory::Kind::kStaging);
  charge_ = memory::Charge(device_.ledger(), memory::Tier::kDevice, memory::Kind::kStaging,
                           slice * place_.count);
}

void WholeParameters::for_each_window(const Unit& unit,
                                      const std::function<void(const Window&)>& work) const {
  const Numel shard = unit.layout.shard();
  for (Numel begin; begin < shard; begin += window_)
    work({begin, std::min(shard, begin + window_)});
}

void WholeParameters::for_each_owned(
    const Unit& unit, const Window& window,
    const std::function<void(Owned& owned, Numel first, Numel at, Numel numel)>& work) {
  for (const plan::Slot& slot : unit.layout.slots()) {
    const auto owned = owned_.find(slot.param);
    if (owned == owned_.end()) continue;
    for (int index = 0; index < place_.count; ++index) {
      const Numel begin = unit.layout.shard() * index + window.begin;
      const Numel low = std::max(begin, slot.offset);
      const Numel high = std::min(begin + window.numel(), slot.end());
      if (low < high)
        work(owned->second, low - slot.offset, window.numel() * index + (low - begin), high - low);
    }
  }
}

void WholeParameters::bring(const Unit& unit, std::span<const std::byte> mine, Values values) {
  for_each_window(unit, [&](const Window& window) {
    const std::span<std::byte> all = buffer_->local();
    const Bytes slice = bytes_of(window.numel(), DType::kFloat32);
    copy(part(all, window.numel() * place_.index, window.numel()),
         mine.subspan(bytes_of(window.begin, DType::kFloat32).size(), slice.size()));
    collectives_.group_barrier();  // every rank's slice is written before any rank reads it
    collectives_
        .all_gather({buffer_.get(), Bytes(), slice, slice},
                    all.first((slice * place_.count).size()), unit.name())
        ->wait();
    for_each_owned(unit, window, [&](Owned& owned, Numel first, Numel at, Numel numel) {
      const auto target = values == Values::kWeights ? owned.values : owned.gradients;
      copy(part(target, first, numel), part(all, at, numel));
    });
    // The slice is written again only when every rank has read it.
    if (const auto read = collectives_.finish_gathers()) read->wait();
  });
}

// A sum with zeroes keeps every bit of the other number, since the zeroes are -0.
void WholeParameters::send(const Unit& unit, const Take& take) {
  const std::vector<plan::ShardRange> mine = unit.layout.pieces(place_.index);
  device::Stream& stream = device_.compute_stream();
  for_each_window(unit, [&](const Window& window) {
    const std::span<std::byte> all = part(buffer_->local(), Numel(), window.numel() * place_.count);
    device_.fill_zero(all, stream);
    const std::byte* const zeroes[] = {all.data()};
    device_.sum_in_order(Owned::floats_of(all), zeroes, DType::kFloat32, -1.0F,
                         /*accumulate=*/false, stream);
    for_each_owned(unit, window, [&](Owned& owned, Numel first, Numel at, Numel numel) {
      copy(part(all, at, numel), part(owned.values, first, numel));
    });
    const std::span<float> sum = Owned::floats_of(slice_->bytes()).first(window.numel().size());
    comm::Reduction reduction;
    reduction.source = buffer_.get();
    reduction.result = sum;
    if (place_.groups > 1) reduction.replicas = comm::Replicas::kLater;  // of this group alone
    collectives_.reduce_scatter(reduction, unit.name())->wait();
    for (const plan::ShardRange& piece : mine) {
      const int param = nth(unit.layout.slots(), piece.slot).param;
      const Numel low = std::max(window.begin, piece.shard_offset);
      const Numel high =
          std::min(window.end, piece.shard_offset + (piece.param_end - piece.param_begin));
      if (low < high && owner_.contains(param))
        take(param, low, sum.subspan((low - window.begin).size(), (high - low).size()));
    }
  });
}

}  // namespace strata::engine
