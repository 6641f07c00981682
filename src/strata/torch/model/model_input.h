// A model as the user built it, as far as the engine needs it: its parameters by name, and its tree
// of modules. Plain data; shares the user's tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "strata/base/units.h"
#include "strata/plan/block_search.h"
#include "strata/plan/param_spec.h"

namespace strata::torch {

// How the values of a parameter are lent. `use` gets flat elements from `begin` on, which are valid
// until it returns; if it queues work on the compute stream, until that work has run.
struct Borrowing {
  Bytes piece;            // the most that is brought from another rank, or from a drive, at once
  bool own_part = false;  // only the part that this rank's shard holds; the borrower needs no other
  bool may_be_whole = false;  // for a moment, on every rank: a gather is faster than many pieces
  std::function<void(Numel begin, const at::Tensor& values)> use;
};

// A model that has sharded a parameter already, as seen by the model that takes its shards over.
class ParameterOwner {
 public:
  virtual ~ParameterOwner() = default;
  // Elements of a parameter that this rank's shard holds: [first, second).
  virtual std::pair<Numel, Numel> owned_range(int param) const = 0;
  // Whether its elements count in the order of the format channels_last.
  virtual bool channels_last(int /*param*/) const { return false; }
  // Collective. Calls borrowing.use() for all of a parameter's values.
  virtual void lend_values(int param, const Borrowing& borrowing) = 0;
  // Collective. The owner leaves its parameters empty and cannot be used any more.
  virtual void retire() = 0;
  // Called after all ranks have retired their owners: memory that peers have freed is only returned
  // when this rank unmaps it.
  virtual void unmap_freed() = 0;
};

// One parameter of the user's model.
struct ModelParameter {
  std::string name;
  at::Tensor variable;              // the user's tensor object
  std::vector<std::int64_t> shape;  // full
  bool has_values = true;           // false: born flat, values come from files
  int group = 0;                    // of the optimizer; -1: none trains it
  // Another model that has sharded this parameter already, and its index there. Its values are
  // taken over shard by shard; the owner retires when all its parameters are taken over.
  std::shared_ptr<ParameterOwner> owner;
  int owner_index = 0;
  std::optional<plan::TileOf> tile;  // of a tile; the owner has the parameter that it is a part of

  // Not from files, and not from another model.
  bool has_own_values() const { return has_values && owner == nullptr; }
};

struct ModelInput {
  std::vector<ModelParameter> parameters;
  plan::ModuleTree tree;
};

}  // namespace strata::torch
