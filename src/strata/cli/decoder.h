// A decoder-only transformer without its files: its parameters' names and shapes by the rules of
// its architecture, from the numbers of a Hugging Face config.json, or of a well-known model that
// ships with the program. Names are those of transformers' classes for language modelling, in the
// order of their constructors. Values; pure functions. Errors: UsageError for an architecture
// without rules, and for a number that is missing or that no model has.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/units.h"

namespace strata::cli {

struct NamedTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  DType dtype = DType::kFloat32;
  bool trainable = true;
};

// An estimate of what autograd keeps of one token until backward: without dropout, by an attention
// kernel that keeps no scores (SDPA, flash), with the loss over all tokens at once.
struct Activations {
  struct Values {
    double computed = 0;  // in the dtype that the model computes in
    double in_fp32 = 0;
  };
  double layers = 0;
  double hidden = 0;
  Values block;  // of one
  Values head;   // of the last norm, the logits and their gradients

  // `checkpointing`: the inputs of blocks are kept, and one block at a time is computed again.
  Bytes of_token(DType dtype, bool checkpointing) const;
};

struct ModelNames {
  std::vector<NamedTensor> tensors;
  bool tied_head = false;  // a head shares the weight of the embedding, and has none of its own
  bool in_order = false;   // tensors are in the order in which the model makes them
  std::optional<Activations> activations{};
  std::vector<std::string> remarks{};
};

// `origin` names the configuration in messages.
ModelNames decoder_names(const nlohmann::json& config, const std::string& origin);

// The models that ship with the program, by name: their configurations.
std::vector<std::pair<std::string, nlohmann::json>> shipped_models();

}  // namespace strata::cli
