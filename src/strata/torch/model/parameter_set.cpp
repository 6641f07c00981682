#include "strata/torch/model/parameter_set.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/torch/base/dtype.h"

namespace strata::torch {
namespace {

c10::intrusive_ptr<c10::StorageImpl> make_storage(c10::Device place) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), c10::SymInt(0),
                                               c10::DataPtr(nullptr, place), nullptr,
                                               /*resizable=*/false);
}

// A view made without set_(), whose bounds checks would need memory behind the storage.
at::Tensor make_view(const c10::intrusive_ptr<c10::StorageImpl>& storage,
                     const plan::ParamSpec& spec, Numel offset) {
  const auto scalar = to_scalar_type(spec.dtype);
  const c10::DispatchKey key = c10::computeDispatchKey(scalar, c10::kStrided, storage->device());
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(scalar));
  view.unsafeGetTensorImpl()->set_storage_offset(offset.value);
  view.unsafeGetTensorImpl()->set_sizes_contiguous(spec.shape);
  return view;
}

// What set_data() does to tensors of one dtype and device. It is an operator, which would ask for
// values that are awaited.
void point(const at::Tensor& variable, const at::Tensor& view) {
  variable.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
}

at::Tensor as_raw_bytes(const at::Tensor& tensor) {
  return tensor.detach().contiguous().reshape({-1}).view(at::kByte);
}

}  // namespace

ParameterSet::ParameterSet(std::vector<at::Tensor> variables, c10::Device place)
    : variables_(std::move(variables)), place_(place) {
  for (std::size_t i = 0; i < variables_.size(); ++i)
    index_.emplace(variables_[i].unsafeGetTensorImpl(), static_cast<int>(i));
}

int ParameterSet::index_of(const at::Tensor& variable) const {
  const auto found = index_.find(variable.unsafeGetTensorImpl());
  return found == index_.end() ? -1 : found->second;
}

void ParameterSet::bind(const engine::Weights& weights) {
  STRATA_ASSERT(views_.empty());
  views_.resize(variables_.size());
  unit_of_.resize(variables_.size());
  for (const engine::Unit& unit : weights.units()) {
    UnitStorage storage{.impl = make_storage(place_), .params = unit.spec.params};
    for (const plan::Slot& slot : unit.layout.slots()) {
      views_[static_cast<std::size_t>(slot.param)] =
          make_view(storage.impl, weights.param(slot.param), slot.offset);
      unit_of_[static_cast<std::size_t>(slot.param)] = static_cast<int>(units_.size());
    }
    units_.push_back(std::move(storage));
  }
  for (std::size_t i = 0; i < variables_.size(); ++i) {
    const auto scalar = to_scalar_type(weights.param(static_cast<int>(i)).dtype);
    empties_.push_back(at::empty({0}, at::TensorOptions().dtype(scalar).device(place_)));
    variables_[i].set_data(views_[i]);
  }
}

void ParameterSet::settle() {
  for (const at::Tensor& variable : variables_)
    accumulators_.push_back(::torch::autograd::impl::try_get_grad_accumulator(variable));
  early_.resize(units_.size());
  for (std::size_t i = 0; i < units_.size(); ++i) {
    if (early_[i].data() != nullptr) {
      attach(static_cast<int>(i), early_[i]);
    } else {
      detach(static_cast<int>(i));
    }
  }
  early_.clear();
}

void ParameterSet::unbind(std::span<const at::Tensor> full) {
  if (units_.empty()) return;
  for (std::size_t i = 0; i < variables_.size(); ++i) {
    const bool given = !full.empty() && full[i].defined();
    variables_[i].set_data(given ? full[i] : empties_[i]);
  }
  forget_awaited();
  for (UnitStorage& unit : units_) give_memory(unit, {});
  views_.clear();
  units_.clear();
  variables_.clear();
  accumulators_.clear();
  index_.clear();
}

void ParameterSet::forget_awaited() {
  for (UnitStorage& unit : units_) {
    if (unit.awaited != nullptr) unit.awaited->forget();
  }
}

bool ParameterSet::held_elsewhere(int unit) const {
  const UnitStorage& storage = units_[static_cast<std::size_t>(unit)];
  std::size_t ours =
      1 + storage.params.size();  // the storage itself, and a view for each parameter
  for (const int param : storage.params) {
    const at::Tensor& variable = variables_[static_cast<std::size_t>(param)];
    if (variable.storage().unsafeGetStorageImpl() == storage.impl.get()) ++ours;
  }
  if (storage.impl.use_count() > ours) return true;
  return std::ranges::any_of(storage.params, [this](int param) {
    const at::Tensor& variable = variables_[static_cast<std::size_t>(param)];
    const bool has_node =
        ::torch::autograd::impl::try_get_grad_accumulator(variable) != nullptr;  // it holds one
    return variable.use_count() > (has_node ? 3U : 2U);  // Python's object, and ours
  });
}

void ParameterSet::attach(int unit, std::span<std::byte> flat) {
  const auto index = static_cast<std::size_t>(unit);
  if (units_.empty()) {
    early_.resize(std::max(early_.size(), index + 1));
    early_[index] = flat;
    return;
  }
  UnitStorage& storage = units_[index];
  give_memory(storage, flat);
  point_all(storage, Pointed::kAtUnit);
}

void ParameterSet::detach(int unit) {
  if (units_.empty()) return;
  UnitStorage& storage = units_[static_cast<std::size_t>(unit)];
  point_all(storage, Pointed::kAtNothing);
  give_memory(storage, {});
}

bool ParameterSet::await(int unit) {
  if (units_.empty() || !complete_ || !may_await_ || !AwaitedStorage::available()) return false;
  UnitStorage& storage = units_[static_cast<std::size_t>(unit)];
  if (storage.awaited == nullptr) make_awaited(unit);
  // Ours are the storage itself, what awaits it, a view for each parameter, and the parameter.
  if (storage.impl.use_count() > 2 + 2 * storage.params.size()) return false;
  storage.awaited->set_nbytes(storage.impl->nbytes());  // who copies it must not find it empty
  point_all(storage, Pointed::kAtAwaited);
  return true;
}

void ParameterSet::point_all(UnitStorage& storage, Pointed at) {
  for (std::size_t i = 0; i < storage.params.size(); ++i) {
    const int param = storage.params[i];
    const auto index = static_cast<std::size_t>(param);
    if (lost_ < 0 && replaced(param) &&
        !(storage.pointed == Pointed::kAtUnit && at == Pointed::kAtNothing &&
          has_values_of_unit(param))) {
      lost_ = param;
    }
    point(variables_[index], at == Pointed::kAtUnit      ? views_[index]
                             : at == Pointed::kAtNothing ? empties_[index]
                                                         : storage.awaited_views[i]);
  }
  storage.pointed = at;
}

bool ParameterSet::replaced(int param) const {
  if (units_.empty()) return false;
  const auto index = static_cast<std::size_t>(param);
  const at::Tensor& variable = variables_[index];
  const c10::StorageImpl* storage = variable.storage().unsafeGetStorageImpl();
  const UnitStorage& unit = units_[static_cast<std::size_t>(unit_of_[index])];
  if (unit.pointed == Pointed::kAtNothing)
    return storage != empties_[index].storage().unsafeGetStorageImpl();
  if (storage != unit.impl.get() && storage != unit.awaited.get()) return true;
  const at::Tensor& view = views_[index];
  return variable.storage_offset() != view.storage_offset() || variable.sizes() != view.sizes() ||
         variable.strides() != view.strides();
}

bool ParameterSet::has_values_of_unit(int param) const {
  const at::NoGradGuard no_grad;
  const at::Tensor& variable = variables_[static_cast<std::size_t>(param)];
  const at::Tensor& view = views_[static_cast<std::size_t>(param)];
  if (variable.scalar_type() != view.scalar_type() || variable.sizes() != view.sizes() ||
      variable.is_meta()) {
    return false;
  }
  return at::equal(as_raw_bytes(variable.to(place_)), as_raw_bytes(view));
}

int ParameterSet::find_changed() {
  for (int param = 0; param < size(); ++param) {
    if (!replaced(param)) continue;
    const UnitStorage& unit =
        units_[static_cast<std::size_t>(unit_of_[static_cast<std::size_t>(param)])];
    if (unit.pointed != Pointed::kAtUnit || !has_values_of_unit(param)) return param;
    put_back(param);
  }
  return -1;
}

void ParameterSet::take_in(int param) {
  const at::NoGradGuard no_grad;
  const at::Tensor& variable = variables_[static_cast<std::size_t>(param)];
  STRATA_ASSERT(variable.sizes() == views_[static_cast<std::size_t>(param)].sizes());
  views_[static_cast<std::size_t>(param)].copy_(variable.detach());
}

void ParameterSet::put_back(int param) {
  if (units_.empty()) return;
  const auto index = static_cast<std::size_t>(param);
  const UnitStorage& unit = units_[static_cast<std::size_t>(unit_of_[index])];
  if (replaced(param)) {
    at::Tensor there = unit.pointed == Pointed::kAtNothing ? empties_[index] : views_[index];
    if (unit.pointed == Pointed::kAtAwaited) {
      const auto position = std::ranges::find(unit.params, param) - unit.params.begin();
      there = unit.awaited_views[static_cast<std::size_t>(position)];
    }
    point(variables_[index], there);
  }
  const auto node = index < accumulators_.size() ? accumulators_[index].lock() : nullptr;
  if (node != nullptr) ::torch::autograd::impl::set_grad_accumulator(variables_[index], node);
  if (lost_ == param) lost_ = -1;
}

void ParameterSet::make_awaited(int unit) {
  UnitStorage& storage = units_[static_cast<std::size_t>(unit)];
  storage.awaited =
      c10::make_intrusive<AwaitedStorage>(storage.impl, [this, unit] { complete_(unit); });
  for (const int param : storage.params) {
    const at::Tensor& view = views_[static_cast<std::size_t>(param)];
    storage.awaited_views.push_back(AwaitedStorage::view(storage.awaited, view));
  }
}

void ParameterSet::give_memory(UnitStorage& storage, std::span<std::byte> memory) const {
  storage.impl->set_data_ptr_noswap(c10::DataPtr(memory.data(), place_));
  storage.impl->set_nbytes(memory.size());
}

}  // namespace strata::torch
