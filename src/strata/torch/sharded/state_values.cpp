#include "strata/torch/sharded/state_values.h"

#include <ATen/ops/empty.h>
#include <fmt/core.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/engine/checkpoint/shard_states.h"
#include "strata/format/manifest.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"

namespace strata::torch {
namespace {

plan::ShardRange piece_of(const engine::Weights& weights, int param, int index) {
  const int slot = weights.slot_index_of(param);
  for (const plan::ShardRange& piece : weights.unit_of(param).layout.pieces(index)) {
    if (piece.slot == slot) return piece;
  }
  return {};
}

std::int64_t count_of(const plan::ShardRange& piece) {
  return piece.param_end.value - piece.param_begin.value;
}

// As the engine's stores and checkpoints name it.
std::string_view kind_of(std::string_view kind) {
  return kind == kMaster ? format::kValue : kind;
}

bool has(const engine::ShardStates& states, int unit, std::string_view kind) {
  const auto kinds = states.kinds_of(unit);
  return std::ranges::find(kinds, kind) != kinds.end();
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
      piece_(piece_of(engine_.weights(), param, engine_.collectives().shard_position().index)) {}

std::pair<std::int64_t, std::int64_t> StateValues::range() const {
  return {piece_.param_begin.value, piece_.param_end.value};
}

void StateValues::finish_queued() {
  engine_.state_offload().require_all("reading or setting a state of a parameter");
  engine_.finish_step();
  engine_.device().compute_stream().synchronize();
}

// A view of this rank's part of the gradient, which must be filled.
at::Tensor StateValues::gradient_view() {
  float* const values = engine_.shards().gradients().values(unit_.id).data();
  return tensor_over(values + piece_.shard_offset.size(), count_of(piece_), at::kFloat,
                     model_.place());
}

std::optional<at::Tensor> StateValues::part(std::string_view kind) {
  finish_queued();
  if (!unit_.trainable()) return std::nullopt;
  if (kind == kGradient) {
    model_.passes().shown_gradients().apply();
    if (!engine_.shards().gradients().filled(unit_.id)) return std::nullopt;
    at::Tensor copy = gradient_view().clone();
    current_stream(model_.place()).synchronize();
    return copy;
  }
  engine::ShardStates states(engine_);
  if (!has(states, unit_.id, kind_of(kind))) return std::nullopt;
  const auto dtype = to_scalar_type(states.dtype_of(unit_.id, kind_of(kind)));
  const at::Tensor copy = at::empty({count_of(piece_)}, dtype);
  states.enqueue_read(unit_.id, kind_of(kind), piece_.shard_offset, Numel(count_of(piece_)),
                      mutable_bytes(copy));
  states.settle();
  return copy.to(at::TensorOptions(at::kFloat).device(model_.place()));
}

std::optional<at::Tensor> StateValues::whole(std::string_view kind) {
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
  // If every shard group holds all shards, those of the first group count.
  for (int index = 0; index < unit_.layout.world_size(); ++index) {
    const plan::ShardRange piece = piece_of(weights, param_, index);
    if (count_of(piece) == 0) continue;
    engine_.collectives().broadcast(
        mutable_bytes(all.narrow(0, piece.param_begin.value, count_of(piece))), index);
  }
  engine_.device().compute_stream().synchronize();
  return all;
}

void StateValues::set_masters(const at::Tensor& values) {
  engine_.require_intact_weights();
  engine_.gatherer().invalidate(engine::Changed::kAll);
  engine_.collectives().barrier();  // now no rank reads this rank's shard
  engine_.weights().store(param_, piece_.param_begin, Numel(count_of(piece_)),
                          mutable_bytes(values).data(), DType::kFloat32);
  engine_.weights_changed();
}

bool StateValues::set_part(std::string_view kind, const at::Tensor& values) {
  require_numel(values, count_of(piece_), engine_.weights().param(param_).name);
  if (!unit_.trainable()) return false;
  finish_queued();
  if (kind == kMaster) {
    set_masters(values);
    return true;
  }
  if (kind == kGradient) {
    if (!engine_.shards().gradients().filled(unit_.id)) return false;
    model_.passes().shown_gradients().take_back();
    engine_.reducer().edits().store(unit_.id, engine_.weights().slot_index_of(param_),
                                    values.const_data_ptr<float>());
    current_stream(model_.place()).synchronize();
    model_.passes().shown_gradients().show();
    return true;
  }
  engine::ShardStates states(engine_);
  if (!has(states, unit_.id, kind_of(kind))) return false;
  states.enqueue_store(param_, kind_of(kind), piece_.param_begin, Numel(count_of(piece_)),
                       mutable_bytes(values).data(), DType::kFloat32);
  states.settle();
  return true;
}

bool StateValues::set_whole(std::string_view kind, const at::Tensor& values) {
  require_numel(values, engine_.weights().slot_of(param_).numel.value,
                engine_.weights().param(param_).name);
  return set_part(kind,
                  values.narrow(0, piece_.param_begin.value, count_of(piece_)).to(model_.place()));
}

}  // namespace strata::torch
