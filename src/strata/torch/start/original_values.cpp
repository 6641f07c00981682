#include "strata/torch/start/original_values.h"

#include <ATen/ops/empty.h>

#include "strata/base/error.h"
#include "strata/memory/host_buffer.h"
#include "strata/torch/base/channels_last.h"

namespace strata::torch {
namespace {

void point_back(at::Tensor variable, const at::Tensor& values) {
  variable.set_data(values);
}

at::Tensor nothing_like(const at::Tensor& variable) {
  return at::empty({0}, variable.options().requires_grad(false));
}

// Memory with another deleter may belong to an owner who still reads it.
bool is_of_torchs_allocator(const c10::Storage& storage) {
  const c10::Allocator* const allocator = storage.allocator();
  return allocator != nullptr && allocator->raw_deleter() != nullptr &&
         storage.data_ptr().get_deleter() == allocator->raw_deleter();
}

}  // namespace

OriginalValues::OriginalValues(const std::vector<ModelParameter>& parameters,
                               std::span<const plan::ParamSpec> specs)
    : gone_(parameters.size()) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ModelParameter& parameter = parameters[i];
    const bool channels_last = specs[i].channels_last;
    variables_.push_back(parameter.variable);
    values_.push_back(parameter.has_own_values()
                          ? in_memory_order(parameter.variable.detach(), channels_last)
                          : at::Tensor());
    channels_last_.push_back(channels_last);
    homes_.push_back(parameter.variable.device());
  }
}

void OriginalValues::move(int param, at::Tensor values) {
  const auto i = static_cast<std::size_t>(param);
  point_back(variables_[i], from_memory_order(values, channels_last_[i]));
  values_[i] = std::move(values);
}

void OriginalValues::give_up(int param) {
  const auto i = static_cast<std::size_t>(param);
  point_back(variables_[i], nothing_like(values_[i]));
  values_[i].reset();
  gone_[i] = true;
  ++given_up_;
}

std::vector<at::Tensor> OriginalValues::release() {
  std::vector<at::Tensor> handed_over;
  for (at::Tensor& values : values_) {
    if (values.defined() && values.is_cpu() && values.use_count() == 1) {
      c10::StorageImpl* storage = values.storage().unsafeGetStorageImpl();
      if (values.storage().use_count() == 1 && storage->pyobj_slot()->load_pyobj() == nullptr)
        handed_over.push_back(std::move(values));
    }
    values.reset();
  }
  return handed_over;
}

void free(std::vector<at::Tensor> values) noexcept {
  for (at::Tensor& one : values) {
    const c10::Storage& storage = one.storage();
    if (is_of_torchs_allocator(storage)) {
      memory::give_back_pages({static_cast<std::byte*>(storage.mutable_data()), storage.nbytes()});
    }
    one.reset();
  }
}

void OriginalValues::restore() noexcept {
  for (std::size_t i = 0; i < values_.size(); ++i) {
    try {
      if (gone_[i]) point_back(variables_[i], nothing_like(variables_[i]));
      if (!values_[i].defined()) continue;
      point_back(variables_[i], from_memory_order(values_[i], channels_last_[i]));
      if (values_[i].device() != homes_[i]) move(static_cast<int>(i), values_[i].to(homes_[i]));
    } catch (const std::exception&) {
      continue;  // no room there now: the values are on the host
    }
  }
}

}  // namespace strata::torch
