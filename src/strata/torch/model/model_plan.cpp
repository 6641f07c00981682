#include "strata/torch/model/model_plan.h"

#include <algorithm>
#include <utility>

#include "strata/engine/step_control.h"
#include "strata/torch/base/dtype.h"

namespace strata::torch {
namespace {

plan::PlanOptions plan_options(const engine::Config& config) {
  plan::PlanOptions options;
  options.wrap = config.strata.wrap;
  options.leaf_classes = config.zero.leaf.classes;
  if (config.strata.unit_size) {
    options.unit_bytes = *config.strata.unit_size;
    options.block_unit_bytes = *config.strata.unit_size;
  }
  if (config.zero.stage == 3) {
    options.one_by_one = config.zero.allgather_sequential;
    if (config.strata.unit_size) {
      options.small_bytes = std::min(options.small_bytes, *config.strata.unit_size);
    }
    options.persistence_threshold = config.zero.param_persistence_threshold;
    options.persistence_total = config.zero.model_persistence_threshold;
  }
  return options;
}

// Floating-point parameters compute in the dtype of the configuration; others (quantised, packed)
// travel as they are.
std::vector<plan::ParamSpec> param_specs(const ModelInput& input, const engine::Config& config) {
  std::vector<plan::ParamSpec> specs;
  for (const ModelParameter& parameter : input.parameters) {
    plan::ParamSpec spec;
    spec.name = parameter.name;
    spec.shape = parameter.shape;
    spec.dtype = from_scalar_type(parameter.variable.scalar_type());
    if (is_floating(spec.dtype)) spec.dtype = config.precision.param_dtype;
    spec.trainable = parameter.variable.requires_grad() && parameter.group >= 0;
    spec.group = std::max(parameter.group, 0);
    specs.push_back(std::move(spec));
  }
  return specs;
}

}  // namespace

PlannedModel plan_model(const ModelInput& input, const engine::Config& config) {
  std::vector<plan::ParamSpec> specs = param_specs(input, config);
  plan::ModelPlan plan = plan::plan_units(specs, input.tree, plan_options(config));
  return {std::move(specs), std::move(plan), input.tree};
}

forecast::MemoryForecast forecast_job(const ModelInput& input, const engine::Config& config,
                                      engine::UpdateRule rule, const forecast::Job& job) {
  const PlannedModel model = plan_model(input, config);
  forecast::Training training;
  training.options = engine::engine_options_from(config);
  training.rule = rule;
  training.micro_steps = static_cast<int>(config.batch.accumulation_steps.value_or(1));
  training.runs_ahead = job.on_gpus;
  return forecast::forecast_memory(model.specs, model.plan, model.tree, training,
                                   forecast::traits_of_job(config, job));
}

}  // namespace strata::torch
