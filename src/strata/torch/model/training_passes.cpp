#include "strata/torch/model/training_passes.h"

#include <ATen/TensorOperators.h>

#include "strata/base/dtype.h"

namespace strata::torch {
namespace {

std::vector<Scopes::Scope> scopes_of(const PlannedModel& model) {
  std::vector<Scopes::Scope> scopes;
  for (const plan::ScopeSpec& scope : model.plan.scopes) {
    const plan::ModuleNode& module = engine::nth(model.tree, scope.module);
    scopes.push_back({module.path.empty() ? module.class_name : module.path, scope.units,
                      module.read_in_backward || !module.callable});
  }
  return scopes;
}

}  // namespace

TrainingPasses::TrainingPasses(engine::Engine& engine, const ParameterSet& parameters,
                               const PlannedModel& model, const engine::Config& config)
    : engine_(engine),
      control_(engine, config),
      scales_loss_(config.precision.scales_loss()),
      pass_({[this] { return hooks_.stored_by_running_graph(); }, [this] { begin_found(); },
             [this] { end_found(); }, [this] { abandon_backward(); }}),
      frozen_(engine, parameters),
      hooks_(engine, parameters, pass_),
      shown_(engine, control_, parameters),
      scopes_(engine, scopes_of(model), [this](std::span<const at::Tensor> outputs) {
        if (in_root_ == 0) end_forward(outputs);
      }) {}

void TrainingPasses::begin_forward() {
  pass_.settle();
  scopes_.failure().rethrow();
  begun_ = true;
  if (engine_.in_backward()) return;  // a checkpoint runs the forward again
  scopes_.release_idle_reads();
  frozen_.train_unfrozen();
  engine_.begin_forward();
}

void TrainingPasses::enter_root() {
  if (!std::exchange(begun_, false) && at::GradMode::is_enabled()) {
    begin_forward();
    begun_ = false;
  }
  if (in_root_ == 0 && !at::GradMode::is_enabled()) engine_.gatherer().sharded().begin_pass();
  ++in_root_;
}

void TrainingPasses::leave_root(std::span<const at::Tensor> outputs) {
  if (--in_root_ == 0) end_forward(outputs);
}

void TrainingPasses::end_forward(std::span<const at::Tensor> outputs) {
  pass_.expect(outputs);
  engine_.gatherer().wait_for_readers();  // a script may write weights from now on
}

void TrainingPasses::show_gradients() {
  if (engine_.reducer().record().collects()) shown_.show();
}

void TrainingPasses::begin_backward(std::span<const engine::GroupScalars> groups) {
  pass_.settle();
  scopes_.failure().rethrow();
  frozen_.train_unfrozen();
  shown_.take_back();
  unforeseen_ = !engine_.forward_seen();
  if (unforeseen_) engine_.begin_forward();
  control_.begin_backward(groups);
  scopes_.begin_backward();
  hooks_.begin_pass(1.0);
  pass_.drive(true);
}

void TrainingPasses::end_backward() {
  pass_.drive(false);
  if (unforeseen_ && !hooks_.took())
    throw UsageError(
        "backward(loss) gave no parameter of this engine a gradient, and no forward of the engine "
        "came before it; give it a loss that depends on this engine's parameters, or call "
        "backward() of the engine whose model made it");
  hooks_.end_pass();
  scopes_.end_backward();
  control_.end_backward();
  shown_.show();
}

void TrainingPasses::begin_found() {
  scopes_.failure().rethrow();
  frozen_.train_unfrozen();
  const std::optional<double> loss_scale = AutogradPass::scale_here();
  if (scales_loss_ && !loss_scale)
    throw UsageError(
        "fp16 needs a scaled loss, and backward() was called on one that is not; call "
        "engine.scale(loss).backward(), or engine.backward(loss)");
  keeps_ = in_root_ > 0;
  shown_.take_back();
  unforeseen_ = false;  // a gradient of this model began the pass, or will come
  if (!engine_.forward_seen()) engine_.begin_forward();
  if (keeps_) {
    engine_.begin_backward(/*boundary=*/false, /*synchronise=*/false);
  } else {
    control_.begin_backward();
    scopes_.begin_backward();
  }
  const double scale = control_.loss_scaler().scale();  // 1 but in fp16
  const double to_ours = scale / loss_scale.value_or(scale);
  const auto steps = static_cast<double>(control_.accumulation_steps());
  hooks_.begin_pass(AutogradPass::divided() ? to_ours : to_ours / steps);
}

void TrainingPasses::end_found() {
  if (!keeps_) return end_backward();
  hooks_.end_pass();
  engine_.end_backward();
  shown_.show();
}

void TrainingPasses::abandon_backward() noexcept {
  pass_.drive(false);
  hooks_.abandon_pass();
  scopes_.failure().attempt([this] { scopes_.end_micro_step(); });
  scopes_.failure().attempt([this] { control_.abandon_backward(); });
}

at::Tensor TrainingPasses::scale(const at::Tensor& loss) {
  if (!scales_loss_) return loss;
  if (!loss.requires_grad())
    throw UsageError(
        "scale(loss) needs a loss that comes from the model, with gradients enabled; found one "
        "that requires no gradient");
  const double scale = control_.loss_scaler().scale();
  return pass_.scaled(loss, scale, scale);
}

at::Tensor TrainingPasses::factored(const at::Tensor& loss, bool by_accumulation) {
  const double factor = control_.loss_factor(by_accumulation);
  if (scales_loss_ && loss.requires_grad())
    return pass_.scaled(loss, factor, control_.loss_scaler().scale());
  return factor == 1.0 ? loss : loss.to(at::kFloat) * factor;
}

std::optional<engine::StepResult> TrainingPasses::step(
    std::span<const engine::GroupScalars> groups) {
  pass_.settle();
  scopes_.failure().rethrow();
  if (control_.ends_step()) {
    engine_.state_offload().require_all("step()");
    shown_.take_back();
  }
  scopes_.end_micro_step();
  const std::shared_ptr<void> claim = scopes_.claim();
  return control_.step(groups);
}

void TrainingPasses::zero_gradients(bool keep) {
  pass_.settle();
  scopes_.failure().rethrow();
  if (!keep) {
    engine_.zero_gradients();
    shown_.hide();
    return;
  }
  engine_.state_offload().require_for_backward("zero_grad(set_to_none=False)");
  shown_.take_back();
  const engine::Weights& weights = engine_.weights();
  for (int param = 0; param < weights.param_count(); ++param) {
    if (engine_.reducer().record().got(param))
      engine_.reducer().edits().drop(weights.unit_of(param).id, weights.slot_index_of(param), true);
  }
  show_gradients();
}

void TrainingPasses::let_go() {
  pass_.settle();
  scopes_.failure().rethrow();
  if (engine_.forward_seen())
    scopes_.release_idle_reads();
  else
    scopes_.end_micro_step();
}

void TrainingPasses::free_gathered() {
  let_go();
  const std::shared_ptr<void> claim = scopes_.claim();
  engine_.gatherer().free_memory();
}

FrozenParameters::FrozenParameters(engine::Engine& engine, const ParameterSet& parameters)
    : engine_(engine), parameters_(parameters) {
  for (int param = 0; param < parameters.size(); ++param) {
    const plan::ParamSpec& spec = engine.weights().param(param);
    if (!spec.trainable && is_floating(spec.dtype) && !spec.tile) frozen_.push_back(param);
  }
}

void FrozenParameters::add_to_group(std::span<const int> params, int group) {
  engine::Weights& weights = engine_.weights();
  for (const int param : params) {
    if (weights.param(param).group < 0) continue;
    throw UsageError("parameter '{}' is in a param group of the optimizer already",
                     weights.param(param).name);
  }
  for (const int param : params) weights.spec_of(param).group = group;
}

void FrozenParameters::train_unfrozen() {
  std::vector<int> unfrozen;
  for (const int param : frozen_) {
    if (parameters_.variable(param).requires_grad()) unfrozen.push_back(param);
  }
  if (!unfrozen.empty()) train(unfrozen);
}

void FrozenParameters::train(std::span<const int> params) {
  const engine::Weights& weights = engine_.weights();
  std::vector<int> trained;
  for (const int param : params) {
    if (weights.param(param).group >= 0 && std::ranges::binary_search(frozen_, param))
      trained.push_back(param);
  }
  if (trained.empty()) return;
  engine_.state_offload().require_all("training parameters that were frozen");
  engine_.finish_step();
  engine_.train_frozen(trained);
  std::erase_if(frozen_, [&](int param) { return weights.param(param).trainable; });
  if (told_) told_(trained);
}

}  // namespace strata::torch
