#include "strata/torch/model/frozen_parameters.h"

#include <algorithm>

#include "strata/base/dtype.h"
#include "strata/base/error.h"

namespace strata::torch {

FrozenParameters::FrozenParameters(engine::Engine& engine, const ParameterSet& parameters)
    : engine_(engine), parameters_(parameters) {
  for (int param = 0; param < parameters.size(); ++param) {
    if (may_be_trained(param)) frozen_.push_back(param);
  }
}

bool FrozenParameters::may_be_trained(int param) const {
  const plan::ParamSpec& spec = engine_.weights().param(param);
  return !spec.trainable && is_floating(spec.dtype) && !spec.tile;
}

void FrozenParameters::add_to_group(std::span<const int> params, int group) {
  engine::Weights& weights = engine_.weights();
  for (const int param : params) {
    if (weights.param(param).group < 0) continue;
    throw UsageError(fmt::format("parameter '{}' is in a param group of the optimizer already",
                                 weights.param(param).name));
  }
  for (const int param : params) weights.spec_of(param).group = group;
}

void FrozenParameters::train_unfrozen() {
  std::vector<int> unfrozen;
  for (const int param : frozen_) {
    if (parameters_.variable(param).requires_grad()) unfrozen.push_back(param);
  }
  if (!unfrozen.empty()) train(unfrozen);
}

void FrozenParameters::train(std::span<const int> params) {
  const engine::Weights& weights = engine_.weights();
  std::vector<int> trained;
  for (const int param : params) {
    if (weights.param(param).group >= 0 && std::ranges::binary_search(frozen_, param))
      trained.push_back(param);
  }
  if (trained.empty()) return;
  engine_.state_offload().require_all("training parameters that were frozen");
  engine_.finish_step();
  engine_.train_frozen(trained);
  std::erase_if(frozen_, [&](int param) { return weights.param(param).trainable; });
  if (told_) told_(trained);
}

}  // namespace strata::torch
