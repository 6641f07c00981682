// A model as its files tell it, without its code: parameters by name and shape, and the tree of
// modules that dotted names make. "model.layers.0.mlp.up_proj.weight" is the parameter `weight` of
// the module `model.layers.0.mlp.up_proj`; modules whose children are numbered are lists, and the
// children of one list are taken to be of one class, so that blocks are found as in a live model.
// Headers of safetensors do not know classes, frozen parameters, or the order in which modules were
// made: siblings are in the order of counting, embeddings first, norms and heads last. The plan
// states its assumptions. Without weights a configuration says more (decoder.h).
//
// Values. Errors: UsageError for a path that is nothing of this, that says what to do instead;
// those of decoder.h, of format::CheckpointIndex and folder.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "strata/cli/decoder.h"
#include "strata/plan/block_search.h"
#include "strata/plan/param_spec.h"

namespace strata::cli {

// Which parameters are trained.
struct TrainedPart {
  // Above 0: the model is frozen, and the linear layers of its blocks have adapters of this rank,
  // by the names that peft gives.
  std::int64_t lora_rank = 0;
  std::vector<std::string> frozen;  // regular expressions, found anywhere in a name
};

struct NamedModel {
  std::vector<plan::ParamSpec> params;  // each in its own dtype
  plan::ModuleTree tree;
  std::vector<std::string> remarks;  // what was assumed
  std::optional<Activations> activations{};
};

NamedModel model_from_names(const ModelNames& names);

// Reads the headers of a Hugging Face folder or a .safetensors file; or a training checkpoint,
// which knows the frozen parameters; or a config.json, alone or in a folder without weights; or
// the name of a model that ships with the program, whatever its case.
NamedModel read_model(const std::string& path, const TrainedPart& trained = {});

}  // namespace strata::cli
