#include "strata/engine/optimize/muon_update.h"

#include <algorithm>

#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

constexpr Numel kPiece{std::int64_t{4} << 20};
constexpr int kScratches = 3;

}  // namespace

MuonUpdate::MuonUpdate(OptimizerShards& shards, const NativeStates& states,
                       offload::StateStore& store, comm::Collectives& collectives,
                       device::Device& device, const std::string& name)
    : shards_(shards),
      states_(states),
      store_(store),
      collectives_(collectives),
      device_(device),
      owners_(
          shards, collectives, device,
          {name + ".muon", DType::kBFloat16, false, [this](const Unit& u) { return takes(u); }}) {}

void MuonUpdate::prepare() {
  owners_.prepare();
  Numel largest;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = nth(shards_.weights().units(), shard.unit);
    if (takes(unit)) largest = std::max(largest, unit.layout.shard());
  }
  if (outgoing_ != nullptr &&
      Bytes(outgoing_->bytes().size()) >= bytes_of(largest, DType::kBFloat16))
    return;
  room_ = std::min(largest, kPiece);
  scratch_ =
      device_.allocate(bytes_of(room_, DType::kFloat32) * kScratches, memory::Kind::kStaging);
  outgoing_ = device_.allocate(bytes_of(largest, DType::kBFloat16), memory::Kind::kStaging);
  device_.fill_zero(outgoing_->bytes(), device_.compute_stream());
}

// values += weight (scale to - values): the first moment of Adam's kernel, whose arithmetic is
// torch's. The kernel's other results go to scratch memory.
void MuonUpdate::lerp(std::span<float> values, std::span<const float> to, double weight,
                      float scale) {
  const Numel numel(values.size());
  kernels::UpdateSpans spans;
  spans.exp_avg = values;
  spans.gradient = to;
  spans.weight = scratch(1, numel);
  spans.exp_avg_sq = scratch(2, numel);
  zero(spans.weight);
  zero(spans.exp_avg_sq);
  kernels::UpdateScalars scalars;
  scalars.lr = 0.0;
  scalars.beta1 = 1.0 - weight;
  scalars.eps = 1.0;
  scalars.bias_correction = false;
  scalars.gradient_scale = scale;
  device_.update_step(spans, scalars, device_.compute_stream());
}

// The momentum of at most room_ elements goes on, and the owner's input goes to `target`.
void MuonUpdate::advance(std::span<std::byte> momentum, DType dtype,
                         std::span<const float> gradient, const GroupScalars& group,
                         const MuonParam& param, float factor, std::byte* target) {
  device::Stream& stream = device_.compute_stream();
  const Numel numel(gradient.size());
  const bool wide = dtype == DType::kFloat32;
  const std::span<float> kept(reinterpret_cast<float*>(momentum.data()), wide ? numel.size() : 0);
  std::unique_ptr<device::Memory> widened;
  std::span<float> values = kept;
  if (!wide) {
    widened = device_.allocate(bytes_of(numel, DType::kFloat32), memory::Kind::kStaging);
    values = {reinterpret_cast<float*>(widened->bytes().data()), numel.size()};
    device_.cast(widened->bytes().data(), DType::kFloat32, momentum.data(), dtype, numel, stream);
  }
  lerp(values, gradient, 1.0 - group.beta1, factor);
  const std::span<float> x = scratch(0, numel);
  if (param.nesterov) {
    const std::byte* const sources[] = {std::as_bytes(gradient).data()};
    device_.sum_in_order(x, sources, DType::kFloat32, factor, /*accumulate=*/false, stream);
    lerp(x, values, group.beta1, 1.0F);
  }
  const std::span<const float> input = param.nesterov ? std::span<const float>(x) : values;
  device_.cast(target, DType::kBFloat16, std::as_bytes(input).data(), DType::kFloat32, numel,
               stream);
  if (!wide) {
    device_.cast(momentum.data(), dtype, widened->bytes().data(), DType::kFloat32, numel, stream);
    stream.synchronize();  // the memory goes
  }
}

void MuonUpdate::make_momentum(const OptimizerShards::UnitShard& shard,
                               std::span<const GroupScalars> groups, float factor) {
  const Unit& unit = nth(shards_.weights().units(), shard.unit);
  const StateBlock block = states_.block(unit.id, plan::kMomentumBuffer);
  const DType dtype = states_.dtype(unit.id);
  const std::span<const float> gradient = shards_.gradients().values(unit.id);
  for (const plan::ParamSegment& segment : shard.segments) {
    if (segment.group < 0 || shards_.gradients().left_out(segment.param)) continue;
    for_each_range(store_, {&block, 1}, unit.layout.shard(), segment.begin, segment.end,
                   offload::Access::kReadWrite, [&](const StateRange& range) {
                     for (Numel at = range.low; at < range.high; at += room_) {
                       const Numel numel = std::min(room_, range.high - at);
                       advance(range.bytes(0).subspan(bytes_of(at - range.first, dtype).size(),
                                                      bytes_of(numel, dtype).size()),
                               dtype, gradient.subspan(at.size(), numel.size()),
                               nth(groups, segment.group), of(segment.param), factor,
                               outgoing_->bytes().data() + bytes_of(at, DType::kBFloat16).size());
                     }
                     for (const auto& lease : range.leases)
                       lease->used_in(device_.compute_stream());
                   });
  }
}

void MuonUpdate::run(std::span<const GroupScalars> groups, float factor) {
  prepare();
  const auto filled = [this](const Unit& unit) {
    return takes(unit) && shards_.gradients().filled(unit.id);
  };
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = nth(shards_.weights().units(), shard.unit);
    if (!filled(unit)) continue;
    make_momentum(shard, groups, factor);
    owners_.bring(unit,
                  outgoing_->bytes().first(bytes_of(unit.layout.shard(), DType::kBFloat16).size()),
                  WholeParameters::Values::kWeights);
  }
  run_and_agree(collectives_, "orthogonalizing matrices", [&] {
    for (const auto& [param, owned] : owners_.owned()) {
      const bool counts =
          filled(shards_.weights().unit_of(param)) && !shards_.gradients().left_out(param);
      if (orthogonalize_ != nullptr && counts) orthogonalize_(param, owned.values);
    }
  });
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = nth(shards_.weights().units(), shard.unit);
    if (!filled(unit)) continue;
    if (unit.layout.dtype() == DType::kFloat64) shards_.weights().masters().adopt_written(unit.id);
    owners_.send(unit, [&](int param, Numel begin, std::span<const float> update) {
      if (shards_.gradients().left_out(param)) return;
      apply(unit, param, begin, update, nth(groups, shards_.weights().param(param).group));
    });
  }
}

// Elements from `begin` on of the shard, by AdamW's kernel in every form of masters: its moments
// are the update and 1 here, so that its step is the update itself.
void MuonUpdate::apply(const Unit& unit, int param, Numel begin, std::span<const float> update,
                       const GroupScalars& group) {
  device::Stream& stream = device_.compute_stream();
  const double factor = of(param).factor;
  GroupScalars scalars;
  scalars.lr = group.lr * factor;
  scalars.weight_decay = group.weight_decay / factor;
  scalars.beta1 = 0.0;
  scalars.beta2 = 1.0;
  scalars.eps = 1.0;  // beside a second moment of 0
  scalars.bias_correction = false;
  scalars.decoupled = true;
  const auto apply_piece = [&](const StateRange& range, const WeightShards::Piece& piece) {
    for (Numel at = piece.begin; at < piece.end; at += room_) {
      const Numel numel = std::min(room_, piece.end - at);
      kernels::UpdateSpans spans = states_.weight_spans(unit, range, piece, at, at + numel);
      spans.gradient = update.subspan((at - begin).size(), numel.size());
      spans.exp_avg = scratch(1, numel);
      spans.exp_avg_sq = scratch(2, numel);
      zero(spans.exp_avg);
      zero(spans.exp_avg_sq);
      device_.update_step(spans, scalars, stream);
    }
    if (piece.lease != nullptr) piece.lease->used_in(stream);
  };
  const Numel end = begin + Numel(update.size());
  const auto apply_range = [&](const StateRange& range) {
    shards_.weights().shards().for_each(
        unit.id, range.low, range.high, offload::Access::kReadWrite, stream,
        [&](const WeightShards::Piece& piece) { apply_piece(range, piece); });
    for (const auto& lease : range.leases) lease->used_in(stream);
  };
  const std::vector<StateBlock>& blocks = shards_.weights().masters().blocks(unit.id);
  if (blocks.empty())
    apply_range({begin, begin, end, {}});
  else
    for_each_range(store_, blocks, unit.layout.shard(), begin, end, offload::Access::kReadWrite,
                   apply_range);
  if (unit.layout.dtype() == DType::kFloat64)
    shards_.weights().masters().round(unit.id, begin, end);
}

}  // namespace strata::engine
