// Finds the blocks of a model: the modules whose parameters are fetched together, usually the
// transformer layers. In this order of preference:
//   1. modules whose class the user named (wrap, transformer_cls);
//   2. repeated blocks: at least two siblings of one class that contain modules of their own, under
//   a
//      container; the outermost such (so a layer, not the experts inside it).
// What is left over (embeddings, final norm, head) is planned module by module (unit_plan).
// Pure function.
#pragma once

#include <string>
#include <vector>

#include "strata/plan/module_tree.h"

namespace strata::plan {

// Indices of the block modules, in tree order; no block contains another.
// Throws ConfigError when a name in `wrap` matches no class of the model, with the nearest names.
std::vector<int> find_blocks(const ModuleTree& tree, const std::vector<std::string>& wrap);

}  // namespace strata::plan
