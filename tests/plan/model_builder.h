// Builds module trees and parameter lists for planning tests, as a front end would: parents first,
// parameters in the order of the tree, tied ones listed once. Not for several threads.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "strata/plan/block_search.h"
#include "strata/plan/param_spec.h"

namespace strata::plan {

class ModelBuilder {
 public:
  ModelBuilder() { tree.push_back({"", "Model", -1, {}, true}); }

  // Adds a module and returns its index.
  int module(int parent, const std::string& name, const std::string& class_name) {
    const std::string& above = tree[static_cast<std::size_t>(parent)].path;
    tree.push_back({above.empty() ? name : above + "." + name, class_name, parent, {}, true});
    return static_cast<int>(tree.size()) - 1;
  }

  // A container that is never called.
  int list(int parent, const std::string& name) {
    const int index = module(parent, name, "ModuleList");
    tree.back().callable = false;
    return index;
  }

  // Adds a parameter to a module and returns its index.
  int param(int owner, const std::string& name, std::int64_t numel, DType dtype = DType::kFloat32,
            bool trainable = true) {
    ModuleNode& node = tree[static_cast<std::size_t>(owner)];
    ParamSpec spec;
    spec.name = node.path.empty() ? name : node.path + "." + name;
    spec.shape = {numel};
    spec.dtype = dtype;
    spec.trainable = trainable;
    params.push_back(std::move(spec));
    node.params.push_back(static_cast<int>(params.size()) - 1);
    return node.params.back();
  }

  // The module uses a parameter that another one owns, too.
  void tie(int owner, int param) { tree[static_cast<std::size_t>(owner)].params.push_back(param); }

  // A linear layer: a module with a weight.
  int linear(int parent, const std::string& name, std::int64_t numel,
             DType dtype = DType::kFloat32) {
    const int index = module(parent, name, "Linear");
    param(index, "weight", numel, dtype);
    return index;
  }

  // A block with a module of its own, so that it counts as one.
  int block(int parent, const std::string& name, const std::string& class_name,
            std::int64_t numel = 64) {
    const int index = module(parent, name, class_name);
    linear(index, "proj", numel);
    return index;
  }

  ModuleTree tree;
  std::vector<ParamSpec> params;
};

}  // namespace strata::plan
