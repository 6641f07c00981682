// Finds the blocks of a model: the modules whose parameters are fetched together, usually the
// transformer layers. In this order of preference:
//   1. modules whose class the user named (wrap, transformer_cls);
//   2. repeated blocks: at least two siblings of one class that contain modules of their own, in a
//      container (one that is never called, or Sequential); the outermost such (so a layer, not the
//      experts inside it).
// Where none of these holds, modules of the classes that the user called leaves are blocks too. A
// class may be named with the Python module that it comes from ("package.module.Class").
// What is left over (embeddings, final norm, head) is planned module by module (unit_plan).
// Pure function.
#pragma once

#include <string>
#include <vector>

#include "strata/plan/module_tree.h"

namespace strata::plan {

// Indices of the block modules, in tree order; no block contains another.
// Throws ConfigError when a name in `wrap` is no class of the model; the message lists those that
// are.
std::vector<int> find_blocks(const ModuleTree& tree, const std::vector<std::string>& wrap,
                             const std::vector<std::string>& leaf_classes = {});

// Indices of the modules of these classes, in tree order; of nested ones the outermost. Names that
// are no class of the model are passed over.
std::vector<int> find_named(const ModuleTree& tree, const std::vector<std::string>& classes);

}  // namespace strata::plan
