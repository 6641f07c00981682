// The values that a model's parameters had before the engine took them. A start that fails puts
// them back. Parameters keep their memory until the engine points them at its own, or until
// give_up(). Threads: one. Ownership: shares the values' memory; the parameters are the user's.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "strata/torch/model/model_plan.h"

namespace strata::torch {

class OriginalValues {
 public:
  explicit OriginalValues(const std::vector<ModelParameter>& parameters);

  int size() const { return static_cast<int>(variables_.size()); }
  // The parameter's values; undefined if it has none of its own or they were given up.
  const at::Tensor& of(int param) const { return values_[static_cast<std::size_t>(param)]; }
  // Takes `values`, a copy of the same values at another place. Frees the old memory; the parameter
  // points at the copy.
  void move(int param, at::Tensor values);
  // Frees the memory of the values for good; the parameter is empty.
  void give_up(int param);
  // The number of parameters whose values were given up.
  int given_up() const { return given_up_; }
  // Drops all values, when nothing can fail any more and the parameters have other memory. Returns
  // the tensors on the host that no other owner shares: freeing them takes the system long, page by
  // page, so another thread can do it (free()). Freeing may take Python's lock: a thread that holds
  // it must not wait for the free.
  std::vector<at::Tensor> release();
  // Gives every parameter its values again, at their old place if there is still room. Those that
  // were given up are empty.
  void restore() noexcept;

 private:
  std::vector<at::Tensor> variables_;
  std::vector<at::Tensor> values_;
  std::vector<c10::Device> homes_;
  std::vector<bool> gone_;
  int given_up_ = 0;
};

// Frees the result of release(). The order and the size of the pieces let other threads map memory
// meanwhile.
void free(std::vector<at::Tensor> values) noexcept;

}  // namespace strata::torch
