#include "strata/torch/model/parameter_set.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/torch/base/tensors.h"

namespace strata::torch {
namespace {

// Memory that views keep, and the device that must outlive it.
struct KeptMemory {
  std::shared_ptr<void> device;
  std::shared_ptr<void> memory;  // goes first
};

at::Tensor as_raw_bytes(const at::Tensor& tensor) {
  return tensor.detach().contiguous().reshape({-1}).view(at::kByte);
}

}  // namespace

ParameterSet::ParameterSet(std::vector<at::Tensor> variables, c10::Device place,
                           std::shared_ptr<void> device)
    : variables_(std::move(variables)), place_(place), device_(std::move(device)) {
  for (std::size_t i = 0; i < variables_.size(); ++i)
    index_.emplace(variables_[i].unsafeGetTensorImpl(), static_cast<int>(i));
}

int ParameterSet::index_of(const at::Tensor& variable) const {
  const auto found = index_.find(variable.unsafeGetTensorImpl());
  return found == index_.end() ? -1 : found->second;
}

void ParameterSet::bind(const engine::Weights& weights) {
  STRATA_ASSERT(storages_.empty());
  unit_of_.resize(variables_.size());
  storages_.reserve(variables_.size());
  for (const engine::Unit& unit : weights.units()) {
    for (const int param : unit.spec.params)
      engine::nth(unit_of_, param) = static_cast<int>(units_.size());
    units_.push_back({.params = unit.spec.params});
  }
  for (std::size_t i = 0; i < variables_.size(); ++i) {
    const int param = static_cast<int>(i);
    const plan::ParamSpec& spec = weights.param(param);
    storages_.emplace_back(spec, weights.slot_of(param).offset, place_);
    empties_.push_back(
        at::empty({0}, at::TensorOptions().dtype(to_scalar_type(spec.dtype)).device(place_)));
    variables_[i].set_data(storages_[i].view());
  }
}

void ParameterSet::settle() {
  for (const at::Tensor& variable : variables_)
    accumulators_.emplace_back(::torch::autograd::impl::try_get_grad_accumulator(variable));
  early_.resize(units_.size());
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    const std::span<std::byte> flat = engine::nth(early_, unit);
    flat.data() != nullptr ? attach(unit, flat) : detach(unit);
  }
  early_.clear();
}

void ParameterSet::unbind(std::span<const at::Tensor> full) {
  if (units_.empty()) return;
  for (std::size_t i = 0; i < variables_.size(); ++i) {
    const bool given = !full.empty() && full[i].defined();
    variables_[i].set_data(given ? full[i] : empties_[i]);
  }
  forget_pending();
  for (ParameterStorage& storage : storages_) storage.take();
  storages_.clear();
  units_.clear();
  variables_.clear();
  accumulators_.clear();
  index_.clear();
}

void ParameterSet::forget_pending() {
  for (ParameterStorage& storage : storages_) storage.forget_pending();
}

std::size_t ParameterSet::others(int unit) const {
  std::size_t result = 0;
  for (const int param : engine::nth(units_, unit).params)
    result += storage_of(param).others(variable(param));
  return result;
}

bool ParameterSet::held_elsewhere(int unit) const {
  if (others(unit) > 0) return true;
  return std::ranges::any_of(engine::nth(units_, unit).params, [this](int param) {
    const at::Tensor& variable = this->variable(param);
    const bool has_node =
        ::torch::autograd::impl::try_get_grad_accumulator(variable) != nullptr;  // it holds one
    return variable.use_count() > (has_node ? 3U : 2U);  // Python's object, and ours
  });
}

void ParameterSet::attach(int unit, std::span<std::byte> flat) {
  if (units_.empty()) {
    early_.resize(std::max(early_.size(), static_cast<std::size_t>(unit) + 1));
    engine::nth(early_, unit) = flat;
    return;
  }
  UnitParams& there = engine::nth(units_, unit);
  there.keeps_views = false;
  for (const int param : there.params) storage_of(param).give(flat.data());
  point_all(unit, Pointed::kAtUnit);
}

void ParameterSet::detach(int unit) {
  if (units_.empty()) return;
  const bool keeps = held(unit);
  point_all(unit, Pointed::kAtNothing);
  for (const int param : engine::nth(units_, unit).params) {
    ParameterStorage& storage = storage_of(param);
    const bool left = keeps && storage.others(variable(param)) > 0 && storage.leave_copy();
    if (!left) storage.take();
  }
}

void ParameterSet::leave(int unit, std::shared_ptr<void> memory) {
  STRATA_ASSERT(!units_.empty());
  const auto kept = std::make_shared<KeptMemory>(KeptMemory{device_, std::move(memory)});
  point_all(unit, Pointed::kAtNothing);
  for (const int param : engine::nth(units_, unit).params) {
    ParameterStorage& storage = storage_of(param);
    if (storage.others(variable(param)) > 0)
      storage.leave(kept);
    else
      storage.take();
  }
}

bool ParameterSet::await(int unit) {
  if (units_.empty() || !complete_ || !may_await_ || !PendingStorage::available()) return false;
  if (others(unit) > 0) return false;
  point_all(unit, Pointed::kAtPending);
  return true;
}

const at::Tensor& ParameterSet::target(int param, Pointed at) {
  if (at == Pointed::kAtNothing) return engine::nth(empties_, param);
  if (at == Pointed::kAtUnit) return storage_of(param).view();
  const int unit = engine::nth(unit_of_, param);
  return storage_of(param).pending_view([this, unit] { complete_(unit); });
}

void ParameterSet::point_all(int unit, Pointed at) {
  UnitParams& there = engine::nth(units_, unit);
  for (const int param : there.params) {
    const bool was_replaced = replaced(param);
    if (was_replaced && lost_ < 0) {
      const bool may_tell =  // the memory attached now lacks the values of the tensor
          there.pointed == Pointed::kAtNothing || at == Pointed::kAtNothing;
      if (!may_tell || !has_nothing_new(param)) lost_ = param;
    }
    point(variable(param), target(param, at));
    if (was_replaced && lost_ != param) restore_node(param);
  }
  there.pointed = at;
}

bool ParameterSet::replaced(int param) const {
  if (units_.empty()) return false;
  const at::Tensor& variable = this->variable(param);
  const c10::StorageImpl* storage = variable.storage().unsafeGetStorageImpl();
  const ParameterStorage& own = storage_of(param);
  if (unit_of(param).pointed == Pointed::kAtNothing)
    return storage != engine::nth(empties_, param).storage().unsafeGetStorageImpl();
  if ((storage != own.impl() && storage != own.awaited()) || own.moved()) return true;
  const at::Tensor& view = own.view();
  return variable.storage_offset() != view.storage_offset() || variable.sizes() != view.sizes() ||
         variable.strides() != view.strides();
}

bool ParameterSet::has_values_of_unit(int param) {
  const at::NoGradGuard no_grad;
  storage_of(param).forget_moved();
  const at::Tensor& variable = this->variable(param);
  const at::Tensor& view = full_view(param);
  const bool converted = variable.scalar_type() != view.scalar_type();
  if (variable.sizes() != view.sizes() || variable.is_meta() ||
      (converted && !(variable.is_floating_point() && view.is_floating_point()))) {
    return false;
  }
  const at::Tensor values = variable.detach().to(view.options());
  if (!at::equal(as_raw_bytes(values), as_raw_bytes(view))) return false;
  if (converted || variable.strides() != view.strides()) converted_ = param;
  return true;
}

bool ParameterSet::has_nothing_new(int param) {
  const Pointed pointed = unit_of(param).pointed;
  if (pointed == Pointed::kAtUnit) return has_values_of_unit(param);
  const at::Tensor& variable = this->variable(param);
  if (pointed != Pointed::kAtNothing || variable.numel() > 0) return false;
  if (variable.scalar_type() != full_view(param).scalar_type()) converted_ = param;
  return true;
}

int ParameterSet::find_changed() {
  for (int param = 0; param < size(); ++param) {
    if (!replaced(param)) continue;
    if (!has_nothing_new(param)) return param;
    put_back(param);
  }
  return -1;
}

void ParameterSet::take_in(int param) {
  const at::NoGradGuard no_grad;
  storage_of(param).forget_moved();
  const at::Tensor& variable = this->variable(param);
  STRATA_ASSERT(variable.sizes() == full_view(param).sizes());
  full_view(param).copy_(variable.detach());
}

void ParameterSet::put_back(int param) {
  if (units_.empty()) return;
  if (replaced(param)) {
    storage_of(param).forget_moved();
    point(variable(param), target(param, unit_of(param).pointed));
  }
  restore_node(param);
  if (lost_ == param) lost_ = -1;
}

void ParameterSet::restore_node(int param) {
  const auto index = static_cast<std::size_t>(param);
  const auto node = index < accumulators_.size() ? accumulators_[index].lock() : nullptr;
  if (node != nullptr)
    ::torch::autograd::impl::set_grad_accumulator(variable(param), WeakNodePtr(node));
}

}  // namespace strata::torch
