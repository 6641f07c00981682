// `p.grad` as scripts see it between backward and step, of parameters whose gradients the engine
// has: there after each backward pass, of the parameter's shape and dtype, summed and averaged over
// ranks as step() will use it (under fp16 times the loss scale). What a script does to it counts:
// operators that change it, another tensor in its place, None.
//
// show() puts a tensor there that has no values yet (AwaitedStorage), so that a script which does
// not look pays for no gather and no memory. The first operator on one brings the values: on one
// rank those of its unit, on several those of all, since all ranks have to take part; a rank that
// does not read does so in its step() (GradientCheck::read()). At stage 3 on several ranks the
// operator throws UsageError that says what to call instead.
//
// take_back() hands the engine what has become of each. Elements that a script left as they were
// keep their fp32 values, whatever the dtype that it saw them in. A tensor that was None'd, or a
// parameter's zero_grad(), drops the parameter's gradient on this rank; where all are gone, what is
// left of the step on this rank goes with them.
//
// Threads: the one that trains, autograd's while it waits. Ownership: borrows the engine; scripts
// may keep the tensors, and those that were never read throw once their step is over. Errors:
// UsageError; those of the engine.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "strata/engine/engine.h"
#include "strata/engine/step_control.h"
#include "strata/torch/model/awaited_storage.h"
#include "strata/torch/model/parameter_set.h"

namespace strata::torch {

class ParameterGradients {
 public:
  ParameterGradients(engine::Engine& engine, engine::StepControl& control,
                     const ParameterSet& parameters);
  ~ParameterGradients();
  ParameterGradients(const ParameterGradients&) = delete;
  ParameterGradients& operator=(const ParameterGradients&) = delete;

  // A parameter that the engine has in tiles, whose gradient nobody can read: an operator on it
  // throws UsageError. None, and zero_(), are for all of its tiles.
  void add_tiled(const at::Tensor& whole, const std::vector<std::int64_t>& shape,
                 const std::vector<int>& tiles);
  // After a backward pass.
  void show();
  // Tells the engine what scripts have done, and goes on showing it.
  void apply();
  // The same, and shows nothing any more. Before a backward pass and a step.
  void take_back() {
    apply();
    hide();
  }
  // Nothing is shown, and what scripts have done does not count.
  void hide();

 private:
  enum class Look { kHidden, kUnread, kZeroed, kRead };
  struct Shown {
    std::vector<int> params;  // one, or the tiles of one
    at::Tensor whole = {};    // of tiles: the script's parameter
    std::vector<std::int64_t> shape = {};
    at::Tensor tensor = {};  // what `.grad` is, or was; undefined: never
    c10::intrusive_ptr<c10::StorageImpl> values = {};
    c10::intrusive_ptr<AwaitedStorage> storage = {};
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
