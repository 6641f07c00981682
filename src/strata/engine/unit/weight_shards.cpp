#include "strata/engine/unit/weight_shards.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "strata/base/error.h"
#include "strata/offload/host_memory.h"

namespace strata::engine {
namespace {

// An array of masters in a StateStore: its name, and its bits of an element.
struct MasterArray {
  const char* suffix;
  int bits;
};

std::span<const MasterArray> arrays_of(plan::MasterForm form) {
  static constexpr MasterArray kWide[] = {{".master", 32}};
  static constexpr MasterArray kRemainder[] = {{".master.low", 16}, {".master.halves_up", 1}};
  if (form == plan::MasterForm::kFloat32) return kWide;
  if (form == plan::MasterForm::kRemainder) return kRemainder;
  return {};
}

}  // namespace

// In groups of as many elements as may share a value.
Numel elements_at_once(std::span<const StateBlock> blocks, Bytes budget) {
  constexpr int kGroup = 256;
  std::vector<int> bits;
  for (const StateBlock& block : blocks) bits.push_back(block.bits * kGroup / block.elements);
  constexpr Bytes kEnough =
      1_GiB * (std::int64_t{1} << 20);  // groups times elements must not overflow
  return offload::elements_at_once(bits, std::min(budget, kEnough)) * kGroup;
}

void for_each_range(offload::StateStore& store, std::span<const StateBlock> blocks, Numel numel,
                    Numel begin, Numel end, offload::Access access,
                    const std::function<void(const StateRange&)>& work, Bytes limit) {
  STRATA_ASSERT(!blocks.empty() && begin <= end && end <= numel);
  if (begin == end) return;
  const Numel least = elements_at_once(blocks, Bytes());
  const Bytes budget = store.lease_budget(blocks.front().id);
  const Numel most = elements_at_once(blocks, std::min(budget, limit));
  const Numel last =
      std::min(numel, Numel((end.value + least.value - 1) / least.value * least.value));
  for (Numel first = Numel(begin.value / least.value * least.value); first < end;) {
    const Numel until = most < last - first ? first + most : last;
    std::vector<offload::Part> parts;
    for (const StateBlock& block : blocks) {
      const Bytes from = block.bytes_of(first);
      const Bytes to = until == numel ? store.size_of(block.id) : block.bytes_of(until);
      parts.push_back({block.id, from, to});
    }
    const auto leases = store.fetch_all(parts, access);
    work({first, std::max(first, begin), std::min(until, end), leases});
    first = until;
  }
}

void WeightShards::add(std::span<const Unit> units) {
  std::vector<offload::BlockSpec> blocks;
  for (const Unit& unit : units) {
    if (unit.offloaded)
      blocks.push_back({unit.name(), unit.layout.shard_bytes(), memory::Kind::kWeights,
                        unit.spec.place.weights});
  }
  std::vector<offload::BlockId> ids;
  if (!blocks.empty()) ids = store_->add_all(std::move(blocks));
  auto next = ids.begin();
  for (const Unit& unit : units) {
    STRATA_ASSERT(static_cast<std::size_t>(unit.id) == blocks_.size());
    blocks_.push_back(unit.offloaded ? *next++ : -1);
  }
}

void WeightShards::for_each(int index, Numel begin, Numel end, offload::Access access,
                            device::Stream& stream, const Work& work) const {
  const Unit& unit = nth(units_, index);
  const DType dtype = unit.layout.dtype();
  unit.await_update(stream);
  if (unit.away) offload::throw_offloaded(fmt::format("the weights of unit '{}'", unit.name()));
  if (!unit.offloaded) {
    if (begin >= end) return;
    const std::size_t bytes = bytes_of(end - begin, dtype).size();
    return work({begin, end, unit.shard.subspan(bytes_of(begin, dtype).size(), bytes), nullptr});
  }
  const StateBlock block{nth(blocks_, index), static_cast<int>(size_of(dtype).value) * 8};
  for_each_range(*store_, {&block, 1}, unit.layout.shard(), begin, end, access,
                 [&](const StateRange& range) {
                   work({range.low, range.high, range.wanted(dtype), range.leases.front().get()});
                 });
}

OwedMasters take_joined(OwedMasters& owed) {
  OwedMasters joined;
  std::ranges::sort(owed, {}, [](const ShardPart& p) { return std::tuple(p.unit, p.begin); });
  for (const ShardPart& part : std::exchange(owed, {})) {
    if (!joined.empty() && joined.back().unit == part.unit && part.begin <= joined.back().end)
      joined.back().end = std::max(joined.back().end, part.end);
    else
      joined.push_back(part);
  }
  return joined;
}

void MasterStates::add(std::span<const Unit> units) {
  std::vector<offload::BlockSpec> specs;
  for (const Unit& unit : units) {
    for (const MasterArray& array : arrays_of(form(unit.id))) {
      // Whole lines, so that they take as much one by one as together.
      const Bytes bytes = align_up(Bytes((unit.layout.shard().value * array.bits + 7) / 8), 64_B);
      specs.push_back({unit.name() + array.suffix, bytes, memory::Kind::kMasterWeights,
                       unit.spec.place.states});
    }
  }
  const std::vector<offload::BlockId> ids = store_.add_all(std::move(specs));
  auto next = ids.begin();
  for (const Unit& unit : units) {
    fresh_.insert(unit.id);
    std::vector<StateBlock>& blocks = blocks_[unit.id];
    for (const MasterArray& array : arrays_of(form(unit.id)))
      blocks.push_back({*next++, array.bits});
  }
}

// A remainder of zeroes is that of weights that are exact.
void MasterStates::train(const Unit& unit) {
  add({&unit, 1});
  if (form(unit.id) != plan::MasterForm::kFloat32) return;
  shards_.for_each(unit.id, Numel(), unit.layout.shard(), offload::Access::kRead,
                   device_.compute_stream(), [&](const WeightShards::Piece& piece) {
                     make(unit.id, piece.begin, piece.end - piece.begin, piece.bytes.data(),
                          unit.layout.dtype());
                   });
}

void MasterStates::for_each(int unit, Numel begin, Numel end, offload::Access access,
                            const std::function<void(const StateRange&)>& work) {
  of(unit).await_update(device_.compute_stream());
  if (access == offload::Access::kReadWrite) fresh_.erase(unit);
  const auto held = held_.find(unit);
  const Numel shard = of(unit).layout.shard();
  if (held == held_.end())
    for_each_range(store_, blocks(unit), shard, begin, end, access, work);
  else
    work({Numel(), begin, end, {&held->second, 1}});
}

void MasterStates::make(int unit, Numel begin, Numel numel, const std::byte* source,
                        DType source_dtype) {
  device::Stream& stream = device_.compute_stream();
  const bool wide = form(unit) == plan::MasterForm::kFloat32;
  // Exact weights have remainders of zeroes. Writing these over a link takes most of a start.
  if (!wide && source_dtype == of(unit).layout.dtype() && fresh_.contains(unit)) return;
  for_each(unit, begin, begin + numel, offload::Access::kReadWrite, [&](const StateRange& range) {
    const Numel count = range.high - range.low;
    const std::byte* from = source + bytes_of(range.low - begin, source_dtype).size();
    if (wide) {
      device_.cast(range.wanted(DType::kFloat32).data(), DType::kFloat32, from, source_dtype, count,
                   stream);
    } else {
      device_.store_remainder(remainder_in(range), range.low - range.first, from, source_dtype,
                              count, stream);
    }
  });
}

void MasterStates::round(int unit, Numel begin, Numel end) {
  if (form(unit) != plan::MasterForm::kFloat32) return;
  const DType dtype = of(unit).layout.dtype();
  for_each(unit, begin, end, offload::Access::kRead, [&](const StateRange& range) {
    const auto round_piece = [&](const WeightShards::Piece& piece) {
      const std::size_t at = bytes_of(piece.begin - range.first, DType::kFloat32).size();
      device_.cast(piece.bytes.data(), dtype, range.bytes(0).data() + at, DType::kFloat32,
                   piece.end - piece.begin, device_.compute_stream());
    };
    shards_.for_each(unit, range.low, range.high, offload::Access::kReadWrite,
                     device_.compute_stream(), round_piece);
  });
}

void MasterStates::adopt_written(int unit) {
  if (form(unit) != plan::MasterForm::kFloat32 || !of(unit).whole) return;
  const auto adopt = [&](const StateRange& range) {
    const auto adopt_piece = [&](const WeightShards::Piece& piece) {
      auto* const masters = reinterpret_cast<float*>(range.bytes(0).data());
      device_.adopt_written(
          {masters + (piece.begin - range.first).size(), (piece.end - piece.begin).size()},
          piece.bytes.data(), of(unit).layout.dtype(), device_.compute_stream());
    };
    shards_.for_each(unit, range.low, range.high, offload::Access::kRead, device_.compute_stream(),
                     adopt_piece);
  };
  for_each(unit, Numel(), of(unit).layout.shard(), offload::Access::kReadWrite, adopt);
}

std::span<std::byte> MasterStates::hold(int unit) {
  if (form(unit) == plan::MasterForm::kShard) {
    STRATA_ASSERT(!of(unit).offloaded);
    return of(unit).shard;
  }
  STRATA_ASSERT(form(unit) == plan::MasterForm::kFloat32);
  if (!held_.contains(unit))
    held_.emplace(unit, store_.fetch(blocks(unit).front().id, offload::Access::kReadWrite));
  return held_.at(unit)->bytes();
}

}  // namespace strata::engine
