#include "strata/torch/model/training_passes.h"

#include <utility>
#include <vector>

namespace strata::torch {
namespace {

std::vector<Scopes::Scope> scopes_of(const PlannedModel& model) {
  std::vector<Scopes::Scope> scopes;
  for (const plan::ScopeSpec& scope : model.plan.scopes) {
    const plan::ModuleNode& module = model.tree[static_cast<std::size_t>(scope.module)];
    scopes.push_back({module.path.empty() ? module.class_name : module.path, scope.units,
                      module.read_in_backward || !module.callable});
  }
  return scopes;
}

}  // namespace

TrainingPasses::TrainingPasses(engine::Engine& engine, const ParameterSet& parameters,
                               const PlannedModel& model, const engine::Config& config)
    : engine_(engine),
      hooks_(engine, parameters),
      scopes_(engine, scopes_of(model)),
      control_(engine, config) {}

void TrainingPasses::begin_forward() {
  scopes_.failure().rethrow();
  scopes_.release_idle_reads();
  engine_.begin_forward();
}

void TrainingPasses::begin_backward() {
  scopes_.failure().rethrow();
  control_.begin_backward();
  scopes_.begin_backward();
}

void TrainingPasses::end_backward() {
  scopes_.end_backward();
  control_.end_backward();
}

void TrainingPasses::abandon_backward() noexcept {
  scopes_.failure().attempt([this] { scopes_.end_backward(); });
  scopes_.failure().attempt([this] { control_.abandon_backward(); });
}

std::optional<engine::StepResult> TrainingPasses::step(
    std::span<const engine::GroupScalars> groups) {
  scopes_.failure().rethrow();
  scopes_.end_backward();
  const Scopes::Claim claim(scopes_);
  return control_.step(groups);
}

}  // namespace strata::torch
