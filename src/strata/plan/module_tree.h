// A model's modules, for planning: their names, classes, parents, and the parameters that each
// owns. Filled from torch.nn.Module or torch::nn::Module by the layer above. Immutable value.
#pragma once

#include <string>
#include <vector>

namespace strata::plan {

struct ModuleNode {
  std::string path;         // "" for the root, else "model.layers.0"
  std::string class_name;   // "Qwen3DecoderLayer"
  int parent = -1;          // index; parents come before their children
  std::vector<int> params;  // owned directly, indices into the model's parameters
  bool callable = true;     // false for containers that are never called (ModuleList, ModuleDict)
  // Whether its own parameters take part in the gradients of anything; those of an embedding do
  // not: its backward needs the places that were looked up.
  bool read_in_backward = true;
  bool leaf = false;  // the user wants it gathered as one, with all that it contains
};

using ModuleTree = std::vector<ModuleNode>;

}  // namespace strata::plan
