#include "strata/torch/cpp/module_description.h"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

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

class Walk {
 public:
  explicit Walk(const std::unordered_map<const c10::TensorImpl*, int>& groups) : groups_(groups) {}

  void visit(const nn::Module& module, const std::string& path, int parent) {
    // A module that occurs twice is planned at its first place.
    if (!seen_.insert(&module).second) return;
    const int index = static_cast<int>(result_.modules.size());
    result_.modules.push_back(&module);
    result_.input.tree.push_back({path, class_name_of(module), parent, own_parameters(module, path),
                                  !is_container(module),
                                  module.name() != "torch::nn::EmbeddingImpl"});
    for (const auto& child : module.named_children()) {
      if (child.value() != nullptr) visit(*child.value(), join(path, child.key()), index);
    }
  }

  ModuleDescription take() { return std::move(result_); }

 private:
  static std::string join(const std::string& path, const std::string& name) {
    return path.empty() ? name : path + "." + name;
  }

  std::vector<int> own_parameters(const nn::Module& module, const std::string& path) {
    std::vector<int> own;
    for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = entry.value();
      const c10::TensorImpl* key = tensor.unsafeGetTensorImpl();
      const auto [place, is_new] =
          index_.emplace(key, static_cast<int>(result_.input.parameters.size()));
      if (is_new) add(join(path, entry.key()), tensor);
      own.push_back(place->second);
    }
    return own;
  }

  void add(std::string name, const at::Tensor& tensor) {
    ModelParameter parameter;
    parameter.name = std::move(name);
    parameter.variable = tensor;
    parameter.shape = tensor.sizes().vec();
    const auto group = groups_.find(tensor.unsafeGetTensorImpl());
    if (group != groups_.end()) parameter.group = group->second;
    result_.input.parameters.push_back(std::move(parameter));
  }

  const std::unordered_map<const c10::TensorImpl*, int>& groups_;
  ModuleDescription result_;
  std::unordered_set<const nn::Module*> seen_;
  std::unordered_map<const c10::TensorImpl*, int> index_;
};

}  // namespace

ModuleDescription describe_module(const nn::Module& root,
                                  const std::unordered_map<const c10::TensorImpl*, int>& groups) {
  Walk walk(groups);
  walk.visit(root, "", -1);
  return walk.take();
}

}  // namespace strata::torch
