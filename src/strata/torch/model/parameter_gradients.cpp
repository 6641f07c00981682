#include "strata/torch/model/parameter_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "strata/base/error.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"
#include "strata/torch/model/value_access.h"

namespace strata::torch {
namespace {

constexpr const char* kUnreadAddress =
    "the address of a gradient was asked for before its values were read; read it with an operator "
    "of torch first (p.grad.clone(), say), which brings its values";

// Gives the memory of `tensor` to a storage that tensors already use.
void give_values(c10::StorageImpl& storage, const at::Tensor& tensor) {
  storage.set_data_ptr_noswap(c10::InefficientStdFunctionContext::makeDataPtr(
      tensor.mutable_data_ptr(), [tensor](void*) {}, tensor.device()));
  storage.set_nbytes(tensor.nbytes());
}

[[noreturn]] void refuse_sharded(const std::string& name) {
  throw UsageError(
      "'{}'.grad was read, and at ZeRO stage 3 no rank has a whole gradient; call "
      "strata.utils.safe_get_full_grad(p) on every rank for one parameter, "
      "engine.get_global_grad_norm() for the norm, and set gradient_clipping in the configuration "
      "in place of clip_grad_norm_()",
      name);
}

[[noreturn]] void refuse_tiled(const std::string& name) {
  throw UsageError(
      "'{}'.grad was read or set, and the parameter is used in tiles, so that its gradient is "
      "never whole; call strata.utils.safe_get_full_grad(p) or safe_set_full_grad(p, value), which "
      "work on the host, engine.get_global_grad_norm() for the norm, and set gradient_clipping in "
      "the configuration in place of clip_grad_norm_()",
      name);
}

}  // namespace

ParameterGradients::ParameterGradients(engine::Engine& engine, engine::StepControl& control,
                                       const ParameterSet& parameters)
    : engine_(engine),
      control_(control),
      parameters_(parameters),
      index_of_(static_cast<std::size_t>(parameters.size()), -1) {
  if (!PendingStorage::available()) return;
  for (const engine::Unit& unit : engine.weights().units()) {
    if (!unit.trainable() || unit.spec.tile()) continue;
    for (const plan::Slot& slot : unit.layout.slots()) {
      if (slot.numel == Numel()) continue;
      engine::nth(index_of_, slot.param) = static_cast<int>(shown_.size());
      const plan::ParamSpec& spec = engine.weights().param(slot.param);
      shown_.push_back(
          {.params = {slot.param}, .shape = spec.shape, .channels_last = spec.channels_last});
    }
  }
}

ParameterGradients::~ParameterGradients() {
  hide();
}

// All ranks must show the same gradients, and no rank knows whether others have one.
bool ParameterGradients::shows(const Shown& shown) const {
  if (!variable_of(shown).requires_grad()) return false;
  const engine::GradientRecord& record = engine_.reducer().record();
  return engine_.collectives().world_size() > 1 ||
         std::ranges::any_of(shown.params, [&](int param) { return record.got(param); });
}

void ParameterGradients::add_tiled(const at::Tensor& whole, const std::vector<std::int64_t>& shape,
                                   const std::vector<int>& tiles) {
  if (!PendingStorage::available() || !engine_.weights().unit_of(tiles.front()).trainable()) return;
  shown_.push_back({.params = tiles, .whole = whole, .shape = shape});
}

const std::string& ParameterGradients::name_of(const Shown& shown) const {
  return engine_.weights().param(shown.params.front()).known_name();
}

void ParameterGradients::make(std::size_t index) {
  Shown& shown = shown_[index];
  const DType dtype = engine_.weights().param(shown.params.front()).dtype;
  shown.values = bare_storage(parameters_.place(), 0);
  shown.storage = c10::make_intrusive<PendingStorage>(
      shown.values, [this, index] { read(shown_[index]); }, kUnreadAddress);
  shown.storage->on_zero([this, index] {
    if (shown_[index].look == Look::kRead) return false;
    shown_[index].look = Look::kZeroed;
    return true;
  });
  const at::Tensor view = tensor_in(shown.values, to_scalar_type(dtype), shown.shape,
                                    dense_strides(shown.shape, shown.channels_last));
  shown.storage->set_nbytes(bytes_of(Numel(view.numel()), dtype).size());
  shown.tensor = PendingStorage::view(shown.storage, view);
}

void ParameterGradients::show() {
  for (std::size_t i = 0; i < shown_.size(); ++i) {
    Shown& shown = shown_[i];
    if (!shows(shown)) continue;
    if (!shown.tensor.defined()) make(i);
    grad_of(shown) = shown.tensor;
    shown.look = Look::kUnread;
  }
}

void ParameterGradients::hide() {
  for (Shown& shown : shown_) {
    at::Tensor& grad = grad_of(shown);
    if (grad.defined()) grad.reset();
    const Look look = std::exchange(shown.look, Look::kHidden);
    if (!shown.tensor.defined()) continue;
    // The engine's own references: the tensor, and its storage.
    const bool untouched = look != Look::kRead && shown.storage.use_count() == 2 &&
                           ::torch::autograd::impl::is_tensor_stealable(shown.tensor);
    if (untouched) continue;
    shown.storage->forget([name = name_of(shown)] {
      throw UsageError(
          "'{}'.grad was kept without its values, and its step is over; read it between backward "
          "and step(), by p.grad.clone() say",
          name);
    });
    if (look == Look::kRead) shown.storage->forget();
    shown.tensor.reset();
    shown.storage.reset();
    shown.values.reset();
  }
}

void ParameterGradients::read(Shown& shown) {
  if (shown.look == Look::kRead) return;
  const at::NoGradGuard no_grad;
  const engine::Unit& unit = engine_.weights().unit_of(shown.params.front());
  if (shown.whole.defined()) refuse_tiled(name_of(shown));
  if (shown.look == Look::kUnread) {
    if (engine_.options().stage == 3 && engine_.collectives().world_size() > 1)
      refuse_sharded(name_of(shown));
    control_.read_gradients(unit.id,
                            [this](const engine::Unit& of, const float* flat) { fill(of, flat); });
  }
  if (shown.look != Look::kRead) give(shown, nullptr);  // zeroes, or no gradient was reduced
}

void ParameterGradients::fill(const engine::Unit& unit, const float* flat) {
  for (const plan::Slot& slot : unit.layout.slots()) {
    const int index = engine::nth(index_of_, slot.param);
    if (index < 0) continue;
    Shown& shown = engine::nth(shown_, index);
    if (shown.look == Look::kUnread) give(shown, flat + slot.offset.size());
  }
}

// A gradient that the script has set to None gets values as well: the script may have kept the
// tensor.
void ParameterGradients::give(Shown& shown, const float* values) {
  const plan::ParamSpec& spec = engine_.weights().param(shown.params.front());
  const auto options =
      at::TensorOptions().dtype(to_scalar_type(spec.dtype)).device(parameters_.place());
  const std::int64_t numel = spec.numel().value;
  at::Tensor memory = values == nullptr ? at::zeros({numel}, options) : at::empty({numel}, options);
  if (values != nullptr) memory.copy_(tensor_over(values, numel, at::kFloat, memory.device()));
  give_values(*shown.values, memory);
  const bool zeroed = shown.look == Look::kZeroed;
  shown.look = Look::kRead;
  if (zeroed) drop(shown, /*came=*/true);
}

bool ParameterGradients::all_are_gone() const {
  bool any = false;
  for (const Shown& shown : shown_) {
    if (grad_of(shown).defined()) return false;
    any = any || shown.look != Look::kHidden;
  }
  return any;
}

void ParameterGradients::apply() {
  if (all_are_gone()) {
    engine_.zero_gradients();
    hide();
    return;
  }
  const at::NoGradGuard no_grad;
  for (Shown& shown : shown_) apply(shown);
}

void ParameterGradients::apply(Shown& shown) {
  const at::Tensor& grad = grad_of(shown);
  if (!grad.defined()) {
    if (std::exchange(shown.look, Look::kHidden) != Look::kHidden) drop(shown, /*came=*/false);
    return;
  }
  if (shown.look != Look::kHidden && grad.is_same(shown.tensor)) {
    if (shown.look == Look::kZeroed) {
      drop(shown, /*came=*/true);
      shown.look = Look::kUnread;  // the engine has zeroes now
    }
    if (shown.look != Look::kRead) return;
  }
  take_values(shown, grad);
}

void ParameterGradients::drop(const Shown& shown, bool came) {
  const engine::Weights& weights = engine_.weights();
  for (const int param : shown.params)
    engine_.reducer().edits().drop(weights.unit_of(param).id, weights.slot_index_of(param), came);
}

// Takes a gradient that was read, or that the script has assigned.
void ParameterGradients::take_values(const Shown& shown, const at::Tensor& gradient) {
  const engine::Weights& weights = engine_.weights();
  const int param = shown.params.front();
  if (shown.whole.defined()) refuse_tiled(name_of(shown));
  if (gradient.layout() != at::kStrided || gradient.sizes() != at::IntArrayRef(shown.shape)) {
    throw UsageError(
        "'{}'.grad was set to a tensor that is no gradient of it; give a dense one of its shape "
        "[{}]",
        name_of(shown), fmt::join(shown.shape, ", "));
  }
  const int unit = weights.unit_of(param).id;
  const int slot = weights.slot_index_of(param);
  const bool was_read = shown.look == Look::kRead && gradient.is_same(shown.tensor);
  engine::GradientShards& shards = engine_.reducer().shards();
  const auto [begin, end] = weights.owned_range(param);
  const std::int64_t count = (end - begin).value;
  if (count == 0) {
    if (!was_read) engine_.reducer().edits().store(unit, slot, nullptr);
    return;
  }
  at::Tensor mine = in_memory_order(gradient.detach().to(parameters_.place()), shown.channels_last)
                        .reshape({-1})
                        .narrow(0, begin.value, count);
  if (was_read) {
    const at::Tensor kept = shards.filled(unit)
                                ? tensor_over(shards.values(unit).data() +
                                                  offset_in_shard(engine_, param, begin).size(),
                                              count, at::kFloat, parameters_.place())
                                : at::zeros({count}, mine.options().dtype(at::kFloat));
    const at::Tensor same = kept.to(mine.scalar_type()).eq(mine);
    if (same.all().item<bool>()) return;
    mine = at::where(same, kept, mine.to(at::kFloat));
  }
  mine = mine.to(at::kFloat).contiguous();
  engine_.reducer().edits().store(unit, slot, mine.const_data_ptr<float>());
}

}  // namespace strata::torch
