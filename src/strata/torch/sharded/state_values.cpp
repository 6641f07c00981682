#include "strata/torch/sharded/state_values.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <cstring>
#include <vector>

#include "strata/base/error.h"
#include "strata/kernels/master_remainder.h"
#include "strata/torch/base/dtype.h"
#include "strata/torch/base/placement.h"

namespace strata::torch {
namespace {

plan::ShardPiece piece_of(const engine::Weights& weights, int param, int index) {
  const int slot = weights.slot_index_of(param);
  for (const plan::ShardPiece& piece : weights.unit_of(param).layout.pieces(index)) {
    if (piece.slot == slot) return piece;
  }
  return {};
}

std::int64_t count_of(const plan::ShardPiece& piece) {
  return piece.param_end.value - piece.param_begin.value;
}

std::span<std::byte> values_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

// A copy on the host of `count` values from memory of the model's device.
template <typename T>
std::vector<T> copied_to_host(const T* memory, std::size_t count, c10::Device place) {
  const auto bytes = static_cast<std::int64_t>(count * sizeof(T));
  const at::Tensor copy = tensor_over(memory, bytes, at::kByte, place).to(at::kCPU).contiguous();
  std::vector<T> values(count);
  std::memcpy(values.data(), copy.data_ptr(), count * sizeof(T));
  return values;
}

void require_numel(const at::Tensor& values, std::int64_t wanted, const std::string& name) {
  if (values.scalar_type() == at::kFloat && values.is_contiguous() && values.numel() == wanted)
    return;
  throw UsageError(
      fmt::format("a state of parameter '{}' has {} elements in fp32; give as many; found {} in {}",
                  name, wanted, values.numel(), c10::toString(values.scalar_type())));
}

}  // namespace

StateValues::StateValues(ShardedModel& model, int param)
    : model_(model),
      engine_(model.engine()),
      param_(param),
      unit_(engine_.weights().unit_of(param)),
      piece_(piece_of(engine_.weights(), param, engine_.collectives().shard_place().index)) {}

std::pair<std::int64_t, std::int64_t> StateValues::range() const {
  return {piece_.param_begin.value, piece_.param_end.value};
}

void StateValues::finish_queued() {
  engine_.settle_step();
  engine_.device().compute_stream().synchronize();
}

std::unique_ptr<offload::Lease> StateValues::lease_moment(StateKind kind) {
  auto* adam = dynamic_cast<engine::AdamOptimizer*>(engine_.optimizer());
  if (adam == nullptr) return nullptr;
  using Moment = engine::AdamOptimizer::Moment;
  return adam->lease_moment(unit_.id,
                            kind == StateKind::kFirstMoment ? Moment::kFirst : Moment::kSecond);
}

std::optional<StateValues::Shard> StateValues::shard(StateKind kind) {
  if (!unit_.trainable()) return std::nullopt;
  engine::GradientShards& gradients = engine_.shards().gradients();
  Shard shard;
  switch (kind) {
    case StateKind::kMaster:
      shard.lease = engine_.weights().lease_master(unit_.id);
      shard.values = shard.lease->bytes().data();
      if (engine_.weights().master_form(unit_.id) == plan::MasterForm::kRounded)
        shard.dtype = unit_.layout.dtype();
      return shard;
    case StateKind::kGradient:
      if (!gradients.filled(unit_.id)) return std::nullopt;
      shard.values = std::as_writable_bytes(gradients.values(unit_.id)).data();
      return shard;
    case StateKind::kFirstMoment:
    case StateKind::kSecondMoment:
      shard.lease = lease_moment(kind);
      if (shard.lease == nullptr) return std::nullopt;
      shard.values = shard.lease->bytes().data();
      shard.dtype =
          dynamic_cast<engine::AdamOptimizer&>(*engine_.optimizer()).moment_dtype(unit_.id);
      return shard;
  }
  STRATA_ASSERT(false);
}

at::Tensor StateValues::view(const Shard& shard) const {
  return tensor_over(shard.values + bytes_of(piece_.shard_offset, shard.dtype).size(),
                     count_of(piece_), to_scalar_type(shard.dtype), model_.place());
}

// Of bf16 weights whose masters are kept as remainders.
at::Tensor StateValues::joined_masters() {
  const auto lease = engine_.weights().lease_master(unit_.id);
  const std::size_t numel = unit_.layout.shard().size();
  const auto weights = copied_to_host(
      reinterpret_cast<const kernels::BFloat16*>(unit_.shard.data()), numel, model_.place());
  auto memory = copied_to_host(lease->bytes().data(), lease->bytes().size(), model_.place());
  const kernels::MasterRemainder remainder = kernels::remainder_over(memory, unit_.layout.shard());
  at::Tensor masters = at::empty({count_of(piece_)}, at::kFloat);
  float* out = masters.data_ptr<float>();
  for (std::int64_t i = 0; i < masters.numel(); ++i) {
    const std::size_t at = piece_.shard_offset.size() + static_cast<std::size_t>(i);
    out[i] = kernels::joined_master(weights[at], kernels::remainder_at(remainder, at));
  }
  return masters.to(model_.place());
}

std::optional<at::Tensor> StateValues::part(StateKind kind) {
  finish_queued();
  const bool joined = kind == StateKind::kMaster &&
                      engine_.weights().master_form(unit_.id) == plan::MasterForm::kRemainder;
  if (joined) return joined_masters();
  const auto found = shard(kind);
  if (!found) return std::nullopt;
  at::Tensor copy = view(*found).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  current_stream(model_.place()).synchronize();
  return copy;
}

std::optional<at::Tensor> StateValues::whole(StateKind kind) {
  const std::optional<at::Tensor> mine = part(kind);
  if (!mine) return std::nullopt;
  return join(*mine);
}

std::optional<at::Tensor> StateValues::joined(const std::optional<at::Tensor>& mine) {
  if (mine) require_numel(*mine, count_of(piece_), engine_.weights().param(param_).name);
  finish_queued();
  double missing = mine || count_of(piece_) == 0 ? 0.0 : 1.0;
  engine_.collectives().all_reduce({&missing, 1}, comm::ReduceOp::kMax);
  if (missing > 0.0) return std::nullopt;
  const auto options = at::TensorOptions(at::kFloat).device(model_.place());
  return join(mine ? *mine : at::empty({0}, options));
}

at::Tensor StateValues::join(const at::Tensor& mine) {
  const engine::Weights& weights = engine_.weights();
  at::Tensor all = at::empty({weights.slot_of(param_).numel.value},
                             at::TensorOptions(at::kFloat).device(model_.place()));
  all.narrow(0, piece_.param_begin.value, count_of(piece_)).copy_(mine);
  current_stream(model_.place()).synchronize();
  // Where every shard group holds all of them, those of the first count.
  for (int index = 0; index < unit_.layout.world_size(); ++index) {
    const plan::ShardPiece piece = piece_of(weights, param_, index);
    if (count_of(piece) == 0) continue;
    engine_.collectives().broadcast(
        values_of(all.narrow(0, piece.param_begin.value, count_of(piece))), index);
  }
  engine_.device().compute_stream().synchronize();
  return all;
}

void StateValues::set_masters(const at::Tensor& values) {
  engine_.require_intact_weights();
  engine_.gatherer().invalidate(engine::Changed::kAll);
  engine_.collectives().barrier();  // nobody reads this rank's shard any more
  engine_.weights().store(param_, piece_.param_begin, Numel(count_of(piece_)),
                          values_of(values).data(), DType::kFloat32);
  engine_.weights_changed();
}

bool StateValues::set_part(StateKind kind, const at::Tensor& values) {
  require_numel(values, count_of(piece_), engine_.weights().param(param_).name);
  if (!unit_.trainable()) return false;
  finish_queued();
  if (kind == StateKind::kMaster) {
    set_masters(values);
    return true;
  }
  engine::GradientShards& gradients = engine_.shards().gradients();
  if (kind == StateKind::kGradient && gradients.dtype() != DType::kFloat32) {
    throw UsageError(fmt::format(
        "gradients can be set where they accumulate in fp32; remove data_types.grad_accum_dtype; "
        "found {}",
        name_of(gradients.dtype())));
  }
  const auto found = shard(kind);
  if (!found) return false;
  view(*found).copy_(values);
  current_stream(model_.place()).synchronize();
  if (kind == StateKind::kGradient) gradients.note_change(unit_.id);
  return true;
}

bool StateValues::set_whole(StateKind kind, const at::Tensor& values) {
  require_numel(values, engine_.weights().slot_of(param_).numel.value,
                engine_.weights().param(param_).name);
  return set_part(kind,
                  values.narrow(0, piece_.param_begin.value, count_of(piece_)).to(model_.place()));
}

}  // namespace strata::torch
