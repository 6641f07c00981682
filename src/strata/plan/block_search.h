// Finds the blocks of a model: the modules whose parameters are fetched together, usually the
// transformer layers. In this order of preference:
//   1. modules whose class the user named (wrap, transformer_cls);
//   2. repeated blocks: at least two siblings of one class that contain modules of their own, in a
//      container (one that is never called, or Sequential); the outermost such (so a layer, not the
//      experts inside it).
// Modules that the user called leaves are blocks too; so none is found inside them. A class may be
// named with the Python module that it comes from ("package.module.Class").
// The other modules (embeddings, final norm, head) are planned one by one (unit_plan).
// Pure function.
#pragma once

#include <string>
#include <vector>

namespace strata::plan {

// A model's modules, for planning: their names, classes, parents, and the parameters that each
// owns. Filled from torch.nn.Module or torch::nn::Module by the layer above. Immutable value.
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

// Modules that are gathered as one with all that they contain: those marked in the tree, and these.
struct LeafModules {
  std::vector<std::string> classes = {};
  std::vector<std::string> names = {};  // paths
  std::vector<std::string> name_suffixes = {};

  bool holds(const ModuleNode& node) const;
};

// Indices of the block modules, in tree order; no block contains another.
// Throws ConfigError when a name in `wrap` is no class of the model; the message lists those that
// are.
std::vector<int> find_blocks(const ModuleTree& tree, const std::vector<std::string>& wrap,
                             const LeafModules& leaves = {});

// Indices of the modules of these classes and of leaves, in tree order; of nested ones only the
// outermost. Ignores names that the model does not have.
std::vector<int> find_named(const ModuleTree& tree, const std::vector<std::string>& classes,
                            const LeafModules& leaves = {});

}  // namespace strata::plan
