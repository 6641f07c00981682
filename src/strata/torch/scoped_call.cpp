#include "strata/torch/scoped_call.h"

#include "strata/base/error.h"

namespace strata::torch {

ModuleScopes::ModuleScopes(std::shared_ptr<ShardedModel> model,
                           const ModuleDescription& description)
    : model_(std::move(model)) {
  for (const ::torch::nn::Module* module : description.modules) below_[module];
  const auto& scopes = model_->plan().scopes;
  for (std::size_t i = 0; i < scopes.size(); ++i) {
    const int scope = static_cast<int>(i);
    if (!model_->scopes().needed(scope)) continue;
    int node = scopes[i].module;
    own_[description.modules[static_cast<std::size_t>(node)]].push_back(scope);
    for (; node >= 0; node = description.input.tree[static_cast<std::size_t>(node)].parent) {
      below_[description.modules[static_cast<std::size_t>(node)]].push_back(scope);
    }
  }
}

std::span<const int> ModuleScopes::below(const ::torch::nn::Module& module) const {
  const auto found = below_.find(&module);
  if (found == below_.end()) {
    throw UsageError(
        fmt::format("a scoped call takes a module of the trained model; found a {} that was not "
                    "registered in it when the trainer was made. Use register_module()",
                    module.name()));
  }
  return found->second;
}

std::span<const int> ModuleScopes::of(const ::torch::nn::Module& module) const {
  const auto found = own_.find(&module);
  return found == own_.end() ? std::span<const int>() : std::span<const int>(found->second);
}

EnteredScopes::EnteredScopes(ShardedModel& model, std::span<const int> scopes)
    : model_(model), scopes_(scopes) {
  try {
    for (; entered_ < scopes_.size(); ++entered_) model_.scopes().enter(scopes_[entered_]);
  } catch (...) {
    while (entered_ > 0) model_.scopes().abandon(scopes_[--entered_]);
    throw;
  }
}

EnteredScopes::~EnteredScopes() {
  if (!model_.alive()) return;
  while (entered_ > 0) model_.scopes().abandon(scopes_[--entered_]);
}

void EnteredScopes::leave(std::span<const at::Tensor> inputs, std::span<const at::Tensor> outputs) {
  while (entered_ > 0) model_.scopes().leave(scopes_[--entered_], inputs, outputs);
}

const at::Tensor& ScopedCall::read(const at::Tensor& parameter) const {
  const std::shared_ptr<const ModuleScopes> scopes = scopes_.lock();
  if (scopes != nullptr && scopes->model().alive()) {
    const int param = scopes->model().index_of(parameter);
    if (param >= 0) scopes->model().read(param);
  }
  return parameter;
}

}  // namespace strata::torch
