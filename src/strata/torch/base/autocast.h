// torch.autocast for the lifetime of this object, like Python's context manager of that name;
// without a dtype it does nothing. Casts of weights are not cached for later operations: at stage 3
// the cache would be a whole copy of the model, and the stages would differ in bits where an
// operation uses a weight again. Threads: the state belongs to the thread that made the object.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/Device.h>

#include <optional>

#include "strata/torch/base/tensors.h"

namespace strata::torch {

class AutocastGuard {
 public:
  AutocastGuard(c10::Device place, std::optional<DType> dtype)
      : type_(place.type()), is_used_(dtype.has_value()) {
    if (!is_used_) return;
    was_enabled_ = at::autocast::is_autocast_enabled(type_);
    dtype_before_ = at::autocast::get_autocast_dtype(type_);
    kept_casts_ = at::autocast::is_autocast_cache_enabled();
    at::autocast::set_autocast_enabled(type_, true);
    at::autocast::set_autocast_dtype(type_, to_scalar_type(*dtype));
    at::autocast::set_autocast_cache_enabled(false);
    at::autocast::increment_nesting();
  }
  ~AutocastGuard() {
    if (!is_used_) return;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(type_, was_enabled_);
    at::autocast::set_autocast_dtype(type_, dtype_before_);
    at::autocast::set_autocast_cache_enabled(kept_casts_);
  }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  c10::DeviceType type_;
  bool is_used_;
  bool was_enabled_ = false;
  bool kept_casts_ = true;
  at::ScalarType dtype_before_ = at::kFloat;
};

}  // namespace strata::torch
