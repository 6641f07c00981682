// A model as its files tell it, without its code: parameters by name and shape, and the tree of
// modules that dotted names make. "model.layers.0.mlp.up_proj.weight" is the parameter `weight` of
// the module `model.layers.0.mlp.up_proj`; modules whose children are numbered are lists, and the
// children of one list are taken to be of one class, so that blocks are found as in a live model.
// Headers of safetensors do not know classes, frozen parameters, or the order in which modules were
// made: siblings are in the order of counting, embeddings first, norms and heads last. The plan
// states its assumptions. Without weights a configuration says more.
//
// Values. Errors: UsageError for a path that is nothing of this, that says what to do instead;
// those of decoder_names(), of format::CheckpointIndex and folder.h.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "strata/cli/activations.h"
#include "strata/plan/block_search.h"
#include "strata/plan/param_spec.h"

namespace strata::cli {

struct NamedModel {
  std::vector<plan::ParamSpec> params;  // each in its own dtype
  bool tied_head = false;  // a head shares the weight of the embedding, and has none of its own
  bool in_order = false;   // parameters are in the order in which the model makes them
  std::optional<Activations> activations{};
  std::vector<std::string> remarks{};  // what was assumed
  plan::ModuleTree tree{};             // of with_tree()
};

// A decoder-only transformer without its files: its parameters' names and shapes by the rules of
// its architecture, from the numbers of a Hugging Face config.json, or of a well-known model that
// ships with the program. Names are those of transformers' classes for language modelling, in the
// order of their constructors. `origin` names the configuration in messages. Errors: UsageError for
// an architecture without rules, and for a number that is missing or that no model has.
NamedModel decoder_names(const nlohmann::json& config, const std::string& origin);

// The models that ship with the program, by name: their configurations.
std::vector<std::pair<std::string, nlohmann::json>> shipped_models();

// Which parameters are trained.
struct TrainedPart {
  // Above 0: the model is frozen, and the linear layers of its blocks have adapters of this rank,
  // by the names that peft gives.
  std::int64_t lora_rank = 0;
  std::vector<std::string> frozen;  // regular expressions, found anywhere in a name
};

// The model with the tree that its names make, and its parameters in the order of that.
NamedModel with_tree(NamedModel model);

// Reads the headers of a Hugging Face folder or a .safetensors file; or a training checkpoint,
// which knows the frozen parameters; or a config.json, alone or in a folder without weights; or
// the name of a model that ships with the program, whatever its case.
NamedModel read_model(const std::string& path, const TrainedPart& trained = {});

}  // namespace strata::cli
