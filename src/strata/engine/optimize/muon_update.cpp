#include "strata/engine/optimize/muon_update.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "strata/engine/optimize/whole_parameters.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

constexpr Numel kPiece{std::int64_t{4} << 20};
constexpr int kScratches = 4;

}  // namespace

MuonUpdate::MuonUpdate(OptimizerShards& shards, const NativeStates& states,
                       offload::StateStore& store, comm::Collectives& collectives,
                       device::Device& device, const std::string& name)
    : shards_(shards),
      states_(states),
      store_(store),
      collectives_(collectives),
      device_(device),
      exchange_(collectives, device, name + ".muon") {
  require_undivided_shards(collectives.shard_position());
  plan();
}

void MuonUpdate::plan() {
  const comm::ShardPosition place = collectives_.shard_position();
  std::vector<MatrixParam> matrices;
  std::vector<int> params;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = nth(shards_.weights().units(), shard.unit);
    if (!takes(unit)) continue;
    for (const plan::Slot& slot : unit.layout.slots()) {
      const plan::ParamSpec& spec = shards_.weights().param(slot.param);
      if (!unit.expects(slot) || spec.group < 0) continue;
      const bool apart = spec.matrices_apart && !spec.reordered() && spec.shape.size() > 2;
      const std::int64_t count = apart ? spec.shape.front() : 1;
      const double cost =
          spec.matrix_cost > 0.0 ? spec.matrix_cost : static_cast<double>(slot.numel.value);
      matrices.push_back(
          {unit.id, slot.param, slot.offset, slot.numel, unit.layout.shard(), count, cost});
      params.push_back(slot.param);
    }
  }
  if (params == planned_) return;
  MatrixPlan plan = plan_matrices(matrices, place.count, place.index);
  // Ranks that plan otherwise would wait for each other's parcels in vain.
  if (planned_.empty()) {
    std::string text;
    for (const MatrixWindow& window : plan.exchanged) {
      for (const MatrixRun& run : window.runs)
        text += fmt::format("{} from {}: {}\n", shards_.weights().param(run.param).name,
                            run.begin.value, run.owner);
    }
    agree_on_text(collectives_, "owner of matrices", text);
  }
  planned_ = std::move(params);
  exchange_.set(std::move(plan));
}

void MuonUpdate::prepare() {
  plan();
  exchange_.prepare();
  Numel largest;
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = nth(shards_.weights().units(), shard.unit);
    if (takes(unit)) largest = std::max(largest, unit.layout.shard());
  }
  const Numel room = std::min(largest, kPiece);
  if (scratch_ != nullptr && room <= room_) return;
  room_ = room;
  scratch_ =
      device_.allocate(bytes_of(room_, DType::kFloat32) * kScratches, memory::Kind::kStaging);
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

// Elements from `begin` on of the shard, in fp32.
std::span<const float> MuonUpdate::gradient_of(int unit, Numel begin, Numel numel) {
  const GradientShards::Resting resting = shards_.gradients().resting(unit);
  const std::byte* const from = resting.values.data() + bytes_of(begin, resting.dtype).size();
  if (resting.dtype == DType::kFloat32) return {reinterpret_cast<const float*>(from), numel.size()};
  const std::span<float> wide = scratch(3, numel);
  device_.cast(std::as_writable_bytes(wide).data(), DType::kFloat32, from, resting.dtype, numel,
               device_.compute_stream());
  return wide;
}

void MuonUpdate::make_momentum(const MatrixRun& run, const MatrixPiece& piece,
                               const GroupScalars& group, float factor, std::span<std::byte> x) {
  const Unit& unit = nth(shards_.weights().units(), run.unit);
  const StateBlock block = states_.block(unit.id, plan::kMomentumBuffer);
  const DType dtype = states_.dtype(unit.id);
  const auto advance_range = [&](const StateRange& range) {
    for (Numel at = range.low; at < range.high; at += room_) {
      const Numel numel = std::min(room_, range.high - at);
      advance(range.bytes(0).subspan(bytes_of(at - range.first, dtype).size(),
                                     bytes_of(numel, dtype).size()),
              dtype, gradient_of(unit.id, at, numel), group, of(run.param), factor,
              x.data() + bytes_of(at - piece.at, DType::kBFloat16).size());
    }
    for (const auto& lease : range.leases) lease->used_in(device_.compute_stream());
  };
  for_each_range(store_, {&block, 1}, unit.layout.shard(), piece.at, piece.at + piece.numel,
                 offload::Access::kReadWrite, advance_range);
}

void MuonUpdate::run(std::span<const GroupScalars> groups, float factor) {
  prepare();
  shards_.gradients().wait_for_arrived();
  const auto filled = [this](int unit) { return shards_.gradients().filled(unit); };
  for (const OptimizerShards::UnitShard& shard : shards_.units()) {
    const Unit& unit = nth(shards_.weights().units(), shard.unit);
    if (takes(unit) && filled(unit.id) && unit.layout.dtype() == DType::kFloat64)
      shards_.weights().masters().adopt_written(unit.id);
  }
  const auto group_of = [&](const MatrixRun& run) -> const GroupScalars& {
    return nth(groups, shards_.weights().param(run.param).group);
  };
  MatrixExchange::Steps steps;
  steps.counts = [&](const MatrixRun& run) {
    return filled(run.unit) && !shards_.gradients().left_out(run.param);
  };
  steps.make = [&](const MatrixRun& run, const MatrixPiece& piece, std::span<std::byte> x) {
    make_momentum(run, piece, group_of(run), factor, x);
  };
  steps.apply = [&](const MatrixRun& run, const MatrixPiece& piece,
                    std::span<const std::byte> update) {
    apply(run, piece, group_of(run), update);
  };
  steps.orthogonalize = [this](std::span<const OwnedMatrices> matrices) {
    if (orthogonalize_ != nullptr) orthogonalize_(matrices);
  };
  exchange_.run(steps);
}

// By AdamW's kernel in every form of masters: its moments are the update and 1 here, so that its
// step is the update itself.
void MuonUpdate::apply(const MatrixRun& run, const MatrixPiece& of_shard, const GroupScalars& group,
                       std::span<const std::byte> update) {
  const Unit& unit = nth(shards_.weights().units(), run.unit);
  device::Stream& stream = device_.compute_stream();
  const double factor = of(run.param).factor;
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
      const std::span<float> wide = scratch(0, numel);
      device_.cast(std::as_writable_bytes(wide).data(), DType::kFloat32,
                   update.data() + bytes_of(at - of_shard.at, DType::kBFloat16).size(),
                   DType::kBFloat16, numel, stream);
      spans.gradient = wide;
      spans.exp_avg = scratch(1, numel);
      spans.exp_avg_sq = scratch(2, numel);
      zero(spans.exp_avg);
      zero(spans.exp_avg_sq);
      device_.update_step(spans, scalars, stream);
    }
    if (piece.lease != nullptr) piece.lease->used_in(stream);
  };
  const Numel begin = of_shard.at;
  const Numel end = begin + of_shard.numel;
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
