// The values that a model's parameters had before the engine took them: what a start that fails
// puts back. Parameters keep their memory until the engine points them at its own, or until it is
// given up here. Threads: one. Ownership: shares the values' memory; the parameters are the user's.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "strata/torch/model/model_input.h"

namespace strata::torch {

class OriginalValues {
 public:
  explicit OriginalValues(const std::vector<ModelParameter>& parameters);

  int size() const { return static_cast<int>(variables_.size()); }
  // Undefined for a parameter without values of its own, and for one that was given up.
  const at::Tensor& of(int param) const { return values_[static_cast<std::size_t>(param)]; }
  // The same values at another place; their memory here is freed, and the parameter has them there.
  void move(int param, at::Tensor values);
  // Frees the memory of the values for good; the parameter is empty.
  void give_up(int param);
  // How many were.
  int given_up() const { return given_up_; }
  // Lets all go, when nothing can fail any more; the parameters have other memory by now. What is
  // on the host and has no other owner is handed over: such memory goes back to the system page by
  // page, for which nobody needs to wait. Freeing it may ask for Python's lock: who has that must
  // not wait for it.
  std::vector<at::Tensor> release();
  // Every parameter has its values again, where they were if there is still room for them; those
  // that were given up are empty.
  void restore() noexcept;

 private:
  std::vector<at::Tensor> variables_;
  std::vector<at::Tensor> values_;
  std::vector<c10::Device> homes_;
  std::vector<bool> gone_;
  int given_up_ = 0;
};

// Frees values on the host that nobody else has, in an order and in pieces that let other threads
// map memory meanwhile.
void free(std::vector<at::Tensor> values) noexcept;

}  // namespace strata::torch
