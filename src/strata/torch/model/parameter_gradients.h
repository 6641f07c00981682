// `p.grad` as scripts see it between backward and step, for parameters whose gradients the engine
// holds. It is there after each backward pass, in the parameter's shape and dtype, summed and
// averaged over ranks as step() will use it (under fp16 times the loss scale). Scripts may change
// it by operators, or assign another tensor or None; step() uses the result.
//
// show() assigns a tensor without values (PendingStorage), so a script that does not look pays for
// no gather and no memory. The first operator on one fetches the values: on one rank those of its
// unit, on several those of all units, for which a rank that does not read takes part in its step()
// (GradientCheck::read()). At stage 3 on several ranks it throws UsageError, which names the call
// to use instead.
//
// take_back() hands each result to the engine. Elements that a script did not change keep their
// fp32 values, whatever dtype the script saw. If the script set `.grad` to None or called a
// parameter's zero_grad(), the parameter's gradient is dropped on this rank. If all are dropped,
// the rest of the step's gradients on this rank is dropped with them.
//
// Threads: the one that trains, autograd's while it waits. Ownership: borrows the engine. Scripts
// may keep the tensors; those that were never read throw once their step is over. Errors:
// UsageError; those of the engine.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "strata/engine/engine.h"
#include "strata/engine/step_control.h"
#include "strata/torch/model/parameter_set.h"
#include "strata/torch/model/parameter_storage.h"

namespace strata::torch {

class ParameterGradients : NonCopyable {
 public:
  ParameterGradients(engine::Engine& engine, engine::StepControl& control,
                     const ParameterSet& parameters);
  ~ParameterGradients();

  // Adds a parameter that the engine holds in tiles. Its gradient cannot be read: an operator on it
  // throws UsageError. Assigning None, and zero_(), apply to all of its tiles.
  void add_tiled(const at::Tensor& whole, const std::vector<std::int64_t>& shape,
                 const std::vector<int>& tiles);
  // After a backward pass.
  void show();
  // Hands the scripts' changes to the engine, and keeps the gradients visible.
  void apply();
  // apply(), then hides the gradients. Called before a backward pass and before a step.
  void take_back() {
    apply();
    hide();
  }
  // Hides the gradients and ignores the scripts' changes.
  void hide();

 private:
  enum class Look { kHidden, kUnread, kZeroed, kRead };
  struct Shown {
    std::vector<int> params;  // one, or the tiles of one
    at::Tensor whole = {};    // of tiles: the script's parameter
    std::vector<std::int64_t> shape = {};
    bool channels_last = false;  // of the parameter, and of its gradient
    at::Tensor tensor = {};      // the present or former `.grad`; undefined: none yet
    c10::intrusive_ptr<c10::StorageImpl> values = {};
    c10::intrusive_ptr<PendingStorage> storage = {};
    Look look = Look::kHidden;
  };

  bool shows(const Shown& shown) const;
  const std::string& name_of(const Shown& shown) const;
  bool all_are_gone() const;
  void make(std::size_t index);
  void read(Shown& shown);
  void fill(const engine::Unit& unit, const float* flat);
  void give(Shown& shown, const float* values);
  void apply(Shown& shown);
  void take_values(const Shown& shown, const at::Tensor& gradient);
  void drop(const Shown& shown, bool came);
  const at::Tensor& variable_of(const Shown& shown) const {
    return shown.whole.defined() ? shown.whole : parameters_.variable(shown.params.front());
  }
  at::Tensor& grad_of(const Shown& shown) const { return variable_of(shown).mutable_grad(); }

  engine::Engine& engine_;
  engine::StepControl& control_;
  const ParameterSet& parameters_;
  std::vector<Shown> shown_;   // trainable parameters that have elements
  std::vector<int> index_of_;  // by parameter: into shown_, or -1
};

}  // namespace strata::torch
