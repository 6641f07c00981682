// What training keeps of one parameter beside its weights, as tensors: the fp32 master, the reduced
// gradient of the step so far, Adam's moments. Each rank has its own part of them, a run of the
// parameter's elements; whole ones are put together of all ranks' parts.
//
// Everything here waits for the device, and is for looking and for surgery between steps, not for
// the step itself. Threads: the one that trains. Ownership: returns copies; borrows the model.
// Values are fp32, of one dimension, on the model's device. Errors: UsageError.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "strata/engine/optimize/adam_optimizer.h"
#include "strata/torch/sharded/sharded_model.h"

namespace strata::torch {

enum class StateKind {
  kMaster,    // of a trainable parameter
  kGradient,  // from the first reduction to the end of the step; times the loss scale under fp16
  kFirstMoment,
  kSecondMoment,
};

class StateValues {
 public:
  StateValues(ShardedModel& model, int param);

  // Elements [first, second) of the parameter are this rank's part.
  std::pair<std::int64_t, std::int64_t> range() const;
  // Copies; nullopt where there is no such state, which is so on all ranks alike. whole() is
  // collective.
  std::optional<at::Tensor> part(StateKind kind);
  std::optional<at::Tensor> whole(StateKind kind);
  // Of a state that somebody else keeps: `mine` is this rank's part. Collective; nullopt where a
  // rank lacks its part.
  std::optional<at::Tensor> joined(const std::optional<at::Tensor>& mine);
  // `values`: fp32, of this rank's part, or of the whole parameter. Collective for masters, whose
  // weights follow. False, and nothing is done, where there is no such state.
  bool set_part(StateKind kind, const at::Tensor& values);
  bool set_whole(StateKind kind, const at::Tensor& values);

 private:
  at::Tensor gradient_view();
  at::Tensor join(const at::Tensor& mine);
  void set_masters(const at::Tensor& values);
  void finish_queued();

  ShardedModel& model_;
  engine::Engine& engine_;
  int param_;
  const engine::Unit& unit_;
  plan::ShardPiece piece_;  // of this rank; empty where it has no part
};

}  // namespace strata::torch
