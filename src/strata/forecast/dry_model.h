// A model's passes for an engine, made from its plan and its modules alone: scopes are nested as
// their modules are, forward and backward, and every trainable parameter gets a gradient when the
// scope of its first owner runs backward. Threads: one thread at a time. Ownership: borrows the
// parameters.
#pragma once

#include <span>
#include <vector>

#include "strata/engine/engine.h"
#include "strata/plan/block_search.h"
#include "strata/plan/unit_plan.h"

namespace strata::forecast {

// The order in which gradients come within a scope. A plan does not know it: a block's first layer
// norm may be registered last.
struct Arrival {
  bool reversed = true;   // against the order of the parameters, as autograd's is on the whole
  bool together = false;  // every unit waits for one that comes when all others are there
};

class DryModel {
 public:
  DryModel(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
           const plan::ModuleTree& tree);

  // One forward and backward.
  void run(engine::Engine& engine, bool boundary, Arrival arrival) const;

 private:
  struct Scope {
    std::vector<int> units;
    std::vector<int> tiles;     // used one after the other, once all else of it is gathered
    std::vector<int> params;    // whose gradients its backward makes
    std::vector<int> children;  // scopes inside it, in their order
    bool read_in_backward = true;
  };
  void forward(engine::Engine& engine, int scope) const;
  void backward(engine::Engine& engine, int scope, Arrival arrival) const;
  void backward_through_tiles(engine::Engine& engine, const Scope& scope) const;
  void add_gradients(engine::Engine& engine, std::vector<int> params, Arrival arrival) const;

  std::span<const plan::ParamSpec> params_;
  std::vector<Scope> scopes_;
  std::vector<int> outermost_;
  std::vector<int> outside_;  // parameters that no scope owns
};

}  // namespace strata::forecast
