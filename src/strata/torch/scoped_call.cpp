#include "strata/torch/scoped_call.h"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <functional>
#include <string_view>
#include <unordered_set>

namespace strata::torch {
namespace {

namespace nn = ::torch::nn;

std::string class_name_of(const nn::Module& module) {
  std::string_view name = module.name();
  name = name.substr(0, name.find('<'));
  const std::size_t scope = name.rfind("::");
  if (scope != std::string_view::npos) name.remove_prefix(scope + 2);
  if (name.size() > 4 && name.ends_with("Impl")) name.remove_suffix(4);
  return std::string(name);
}

bool is_container(const nn::Module& module) {
  return dynamic_cast<const nn::ModuleListImpl*>(&module) != nullptr ||
         dynamic_cast<const nn::ModuleDictImpl*>(&module) != nullptr ||
         dynamic_cast<const nn::ParameterListImpl*>(&module) != nullptr ||
         dynamic_cast<const nn::ParameterDictImpl*>(&module) != nullptr;
}

std::string join(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

}  // namespace

ModuleDescription describe_module(const nn::Module& root,
                                  const std::unordered_map<const c10::TensorImpl*, int>& groups) {
  ModuleDescription result;
  std::unordered_set<const nn::Module*> seen;
  std::unordered_map<const c10::TensorImpl*, int> index;
  const std::function<void(const nn::Module&, const std::string&, int)> visit =
      [&](const nn::Module& module, const std::string& path, int parent) {
        // A module that occurs twice is planned at its first place.
        if (!seen.insert(&module).second) return;
        std::vector<int> own;
        for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
          const at::Tensor& tensor = entry.value();
          const auto [place, is_new] = index.emplace(
              tensor.unsafeGetTensorImpl(), static_cast<int>(result.input.parameters.size()));
          own.push_back(place->second);
          if (!is_new) continue;
          ModelParameter parameter;
          parameter.name = join(path, entry.key());
          parameter.variable = tensor;
          parameter.shape = tensor.sizes().vec();
          const auto group = groups.find(tensor.unsafeGetTensorImpl());
          if (group != groups.end()) parameter.group = group->second;
          result.input.parameters.push_back(std::move(parameter));
        }
        const int here = static_cast<int>(result.modules.size());
        result.modules.push_back(&module);
        result.input.tree.push_back({path, class_name_of(module), parent, own,
                                     !is_container(module),
                                     module.name() != "torch::nn::EmbeddingImpl"});
        for (const auto& child : module.named_children()) {
          if (child.value() != nullptr) visit(*child.value(), join(path, child.key()), here);
        }
      };
  visit(root, "", -1);
  return result;
}

ModuleScopes::ModuleScopes(std::shared_ptr<ShardedModel> model,
                           const ModuleDescription& description)
    : model_(std::move(model)) {
  for (const ::torch::nn::Module* module : description.modules) below_[module];
  const auto& scopes = model_->plan().scopes;
  for (std::size_t i = 0; i < scopes.size(); ++i) {
    const int scope = static_cast<int>(i);
    if (!model_->scopes().needed(scope)) continue;
    int node = scopes[i].module;
    if (node == 0) of_root_.push_back(scope);
    for (; node >= 0; node = engine::nth(description.input.tree, node).parent)
      below_[engine::nth(description.modules, node)].push_back(scope);
  }
}

std::span<const int> ModuleScopes::below(const ::torch::nn::Module& module) const {
  const auto found = below_.find(&module);
  if (found == below_.end())
    throw UsageError(
        "a scoped call takes a module of the trained model; found a {} that was not registered in "
        "it when the trainer was made. Use register_module()",
        module.name());
  return found->second;
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
