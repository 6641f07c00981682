// The training states of one parameter as tensors: the fp32 master weights, the reduced gradient of
// the step so far, Adam's moments. Each rank has its own part of them, a range of the parameter's
// elements; a whole state is joined from all ranks' parts.
//
// Every call waits for the device: scripts inspect and edit states between steps with it; the step
// itself does not use it. Threads: the one that trains. Ownership: returns copies; borrows the
// model. Values are fp32, of one dimension, on the model's device. Errors: UsageError.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <utility>

#include "strata/torch/sharded/sharded_model.h"

namespace strata::torch {

// Kinds of states; the others are those of the engine's Adam (engine::kExpAvg, kExpAvgSq).
inline constexpr std::string_view kMaster = "master";  // of a trainable parameter
// From the first reduction to the end of the step; times the loss scale under fp16.
inline constexpr std::string_view kGradient = "gradient";

class StateValues {
 public:
  StateValues(ShardedModel& model, int param);

  // Elements [first, second) of the parameter are this rank's part.
  std::pair<std::int64_t, std::int64_t> range() const;
  // Copies; nullopt if there is no such state, which holds on all ranks or on none. whole() is
  // collective.
  std::optional<at::Tensor> part(std::string_view kind);
  std::optional<at::Tensor> whole(std::string_view kind);
  // Joins a state that the caller keeps: `mine` is this rank's part. Collective; nullopt if a rank
  // lacks its part.
  std::optional<at::Tensor> joined(const std::optional<at::Tensor>& mine);
  // `values`: fp32, for this rank's part or for the whole parameter. Collective for masters,
  // because the weights are updated from them. Returns false and does nothing if there is no such
  // state.
  bool set_part(std::string_view kind, const at::Tensor& values);
  bool set_whole(std::string_view kind, const at::Tensor& values);

 private:
  at::Tensor gradient_view();
  at::Tensor join(const at::Tensor& mine);
  void set_masters(const at::Tensor& values);
  void finish_queued();

  ShardedModel& model_;
  engine::Engine& engine_;
  int param_;
  const engine::Unit& unit_;
  plan::ShardRange piece_;  // of this rank; empty where it has no part
};

}  // namespace strata::torch
