// A model as its files tell it, without its code: parameters by name and shape, and the tree of
// modules that dotted names make. "model.layers.0.mlp.up_proj.weight" is the parameter `weight` of
// the module `model.layers.0.mlp.up_proj`; modules whose children are numbered are lists, and the
// children of one list are taken to be of one class, so that blocks are found as in a live model.
// Classes, frozen parameters, and the order in which modules were made are not known: siblings are
// in the order of counting, embeddings first, norms and heads last. The plan states its
// assumptions.
//
// Values. Errors: UsageError for a folder without safetensors that says what to do instead; those
// of format::CheckpointIndex and folder.h.
#pragma once

#include <string>
#include <vector>

#include "strata/plan/block_search.h"
#include "strata/plan/param_spec.h"

namespace strata::cli {

struct NamedTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  DType dtype = DType::kFloat32;
  bool trainable = true;
};

struct NamedModel {
  std::vector<plan::ParamSpec> params;  // each in its own dtype
  plan::ModuleTree tree;
  std::vector<std::string> remarks;  // what was assumed
};

// `tied_head`: a head shares the weight of the embedding, and has none of its own.
NamedModel model_from_names(const std::vector<NamedTensor>& tensors, bool tied_head);

// Reads the headers of a Hugging Face folder or a .safetensors file; or a training checkpoint,
// which knows the frozen parameters.
NamedModel read_model(const std::string& path);

}  // namespace strata::cli
