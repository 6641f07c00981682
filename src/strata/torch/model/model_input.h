// A model as the user built it, as far as the engine needs it: its parameters by name, and its tree
// of modules. Plain data; shares the user's tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "strata/plan/module_tree.h"
#include "strata/plan/param_spec.h"

namespace strata::torch {

// A model that has sharded a parameter already, as the one that takes its shards over sees it.
class ParameterOwner {
 public:
  virtual ~ParameterOwner() = default;
  // Calls `use` with a parameter's values, which are whole until it returns.
  virtual void lend_values(int param, const std::function<void(const at::Tensor&)>& use) = 0;
  // Collective. The same with elements [begin, begin + numel) of it, and no more memory than these.
  virtual void lend_range(int param, Numel begin, Numel numel,
                          const std::function<void(const at::Tensor&)>& use) = 0;
  // Collective. The owner lets its parameters go, empty, and is of no further use.
  virtual void retire() = 0;
};

// One parameter of the user's model.
struct ModelParameter {
  std::string name;
  at::Tensor variable;              // the user's tensor object
  std::vector<std::int64_t> shape;  // full
  bool has_values = true;           // false: born flat, values come from files
  int group = 0;                    // of the optimizer; -1: none trains it
  // Another model that has sharded this parameter already, and its index there: its values are
  // taken over shard by shard, and it retires when all are.
  std::shared_ptr<ParameterOwner> owner;
  int owner_index = 0;
  std::optional<plan::TileOf> tile;  // of a tile; the owner has the parameter that it is a part of

  // Not from files, and not from another model.
  bool has_own_values() const { return has_values && owner == nullptr; }
  // ParameterOwner's: of the parameter, or of what of it the tile is.
  void lend_of_owner(const std::function<void(const at::Tensor&)>& use) const {
    if (!tile) return owner->lend_values(owner_index, use);
    Numel numel(1);
    for (const std::int64_t size : shape) numel = numel * size;
    owner->lend_range(owner_index, tile->first, numel, use);
  }
};

struct ModelInput {
  std::vector<ModelParameter> parameters;
  plan::ModuleTree tree;
};

}  // namespace strata::torch
